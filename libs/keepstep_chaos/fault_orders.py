"""Accept orders for faults inside this process.

The process listens at ``keepstep-chaos-<process id>-<number>.sock`` in the folder. A connection carries one order, a
line of JSON with ``kind`` and ``seconds``. The answer is a line when the fault is over, with an ``error`` that is empty
if the fault hit. A fault ends early if its connection closes. Only this user and root may order.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.faults import CHAOS_ENV, Act
from keepstep_mesh.threads.starting import Thread

log = get_logger("keepstep.chaos")

SOCKET_NAME = re.compile(r"keepstep-chaos-(\d+)-\d+\.sock")
ORDER_SECONDS = 5.0
MAX_ORDER_BYTES = 1000
LONGEST_FAULT_SECONDS = 600.0
CLOCK_JUMP_SECONDS = 3600.0
_clock = threading.Lock()
_numbers = count(1)


@contextlib.contextmanager
def locked_interpreter(seconds: float) -> Iterator[float]:
    """Hold the GIL, as an extension does that computes without releasing it: no other thread runs Python code."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))  # a PyDLL, unlike a CDLL, keeps the GIL
    yield 0.0


@contextlib.contextmanager
def clock_ahead(seconds: float) -> Iterator[float]:
    """Let ``time.time`` and ``time.time_ns`` of this process be an hour ahead, and go back at the end."""
    with _clock:
        right, right_ns = time.time, time.time_ns
        time.time = lambda: right() + CLOCK_JUMP_SECONDS
        time.time_ns = lambda: right_ns() + int(CLOCK_JUMP_SECONDS * 1e9)
        try:
            yield seconds
        finally:
            time.time, time.time_ns = right, right_ns


def hang(kind: str, over: threading.Event) -> None:
    """Let this thread hang until ``over``: ``hang`` in a wait, ``hang-loop`` in Python code that computes."""
    while not over.is_set():
        if kind == "hang":
            over.wait()


ACTS: Mapping[str, Act] = {"gil": locked_interpreter, "clock": clock_ahead}
"""Faults that any process of Python can bring on itself, by kind."""


class FaultOrders:
    """Carries out one order at a time, in a thread of its own.

    Args:
        folder: for the socket.
        acts: what this process can do beside ``ACTS``, by kind.

    Raises:
        OSError: the socket cannot be opened.
    """

    def __init__(self, folder: Path, acts: Mapping[str, Act]) -> None:
        self._acts = {**ACTS, **acts}
        folder.mkdir(parents=True, exist_ok=True)
        remove_closed_sockets(folder)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._path = _bind(self._listener, folder.absolute())
            self._path.chmod(0o600)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._open: socket.socket | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = Thread(target=self._serve, name="keepstep chaos orders", daemon=True)
        self._thread.start()
        log.warning("this process accepts faults of `keepstep chaos`", variable=CHAOS_ENV, socket=str(self._path))

    def close(self) -> None:
        """End an open fault, and the thread. May be called more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for one in (self._listener, self._open):
                if one is not None:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    hang = staticmethod(hang)

    def end_fault(self) -> None:
        """End the open fault, as the end of its connection does. From any thread."""
        with self._lock:
            if self._open is not None:
                with contextlib.suppress(OSError):
                    self._open.shutdown(socket.SHUT_RD)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                with self._lock:
                    if self._closed:
                        return
                    self._open = connection
                try:
                    self._obey(connection)
                except OSError as error:
                    log.warning("an order of `keepstep chaos` was not answered", reason=str(error))
                finally:
                    with self._lock:
                        self._open = None

    def _obey(self, connection: socket.socket) -> None:
        if not _same_user(connection):
            return
        connection.settimeout(ORDER_SECONDS)
        try:
            kind, seconds = _order(connection, self._acts)
            log.warning("fault injected by `keepstep chaos`", kind=kind, seconds=seconds)
            with self._acts[kind](seconds) as rest:
                connection.settimeout(rest or None)
                with contextlib.suppress(TimeoutError):  # the time is over; a closed connection ends it earlier
                    if rest:
                        connection.recv(1)
            error = ""
        except (ValueError, RuntimeError) as reason:
            error = str(reason)
        connection.settimeout(ORDER_SECONDS)
        connection.sendall(json.dumps({"error": error}).encode() + b"\n")


def _order(connection: socket.socket, acts: Mapping[str, Act]) -> tuple[str, float]:
    """Return the kind and the seconds of an order. Raises ValueError, OSError."""
    with connection.makefile("rb") as lines:
        order = json.loads(lines.readline(MAX_ORDER_BYTES))
    try:
        kind, seconds = str(order["kind"]), float(order["seconds"])
    except (LookupError, TypeError) as error:
        raise ValueError("invalid order: expected an object with kind and seconds") from error
    if kind not in acts:
        raise ValueError(f"kind {kind!r} is not possible in this process; possible kinds: {', '.join(acts)}")
    if not 0 <= seconds <= LONGEST_FAULT_SECONDS:
        raise ValueError(f"invalid seconds {seconds:g}: expected 0 to {LONGEST_FAULT_SECONDS:g}")
    return kind, seconds


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid in (0, os.getuid())


def _bind(listener: socket.socket, folder: Path) -> Path:
    """Bind to a new name. A process in another container with the same process id may share the folder."""
    while True:
        path = folder / f"keepstep-chaos-{os.getpid()}-{next(_numbers)}.sock"
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return path


def remove_closed_sockets(folder: Path) -> None:
    """Remove what killed processes left in ``folder``, also those of other containers, with process ids of their own.

    A connection for datagrams reaches no listener: an open socket answers EPROTOTYPE, a closed one ECONNREFUSED.
    """
    for path in folder.iterdir():
        if SOCKET_NAME.fullmatch(path.name):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()


def opened(folder: Path, acts: Mapping[str, Act]) -> FaultOrders | None:
    """Return open ``FaultOrders``; None: the folder does not work."""
    try:
        return FaultOrders(folder, acts)
    except OSError as error:
        log.error("this process accepts no faults of `keepstep chaos`", folder=str(folder), reason=str(error))
        return None
