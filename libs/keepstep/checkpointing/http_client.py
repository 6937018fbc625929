"""The receiving half of ``HTTPTransport``: blocking sockets, from the kernel straight into the destination tensors.

Each stream is one connection in one thread that asks for runs of chunks, receives them in pieces that fit the
processor's cache, hashes a piece while it is there and checks the chunk before it counts. ``MSG_WAITALL`` with the
socket's own timeout makes a piece one system call without the GIL. What breaks is asked for again from the last chunk
that was verified.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgpack
import xxhash

from keepstep.checkpointing.errors import TransferError, TransferTimeout
from keepstep.checkpointing.manifest import read_manifest
from keepstep.checkpointing.restoring import Destination
from keepstep.checkpointing.transport import Progress
from keepstep_mesh.auth import ClientToken
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.logging import get_logger
from keepstep_mesh.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES

PIECE_BYTES = 1 << 20
MAX_STREAMS = 32
STALL_SECONDS = 10.0
"""A connection on which nothing came for this long is given up and made anew."""
MAX_FAILURES = 5
"""Broken connections in a row, without a chunk between them, after which the source counts as lost."""
MAX_DAMAGES = 3
"""Times that one chunk may arrive damaged."""
FIRST_PAUSE_SECONDS = 0.05
GIVE_BACK_SECONDS = 1.0
MAX_RUN_CHUNKS = 16
"""Chunks that one of several streams asks for at a time."""
SHORT_BYTES = 64 << 10
WAIT_SHARE = 0.9
"""Share of the time left that the source may wait for the step, so that its reason arrives before the deadline."""
_MAX_HEAD_BYTES = 8192
_STATUS = re.compile(r"HTTP/1\.1 (\d{3})(?: |$)")

log = get_logger("keepstep.checkpointing")


class _Broken(Exception):  # handled here: the connection is made anew
    """The connection is of no use any more."""


class _Deadline:
    def __init__(self, seconds: float, what: str) -> None:
        self._end = time.monotonic() + seconds
        self._sentence = f"{what} was not received within {seconds:.1f} s"

    def remaining(self) -> float:
        """Seconds left, more than 0. Raises ``TransferTimeout`` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TransferTimeout(self._sentence)
        return left


class _Connection:
    """One HTTP/1.1 connection. Raises ``_Broken`` when it breaks or stalls, ``TransferTimeout`` at the deadline."""

    def __init__(self, host: str, port: int, token: ClientToken, deadline: _Deadline, patience: float) -> None:
        self._deadline = deadline
        self._patience = patience
        self._received = b""
        fields = {"Host": f"{host}:{port}", **token.peer_headers()}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        timeout = min(patience, deadline.remaining())
        try:
            self._socket = socket.create_connection((host, port), timeout)
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise _Broken(f"cannot connect to {host}:{port}: {error}") from error

    def ask(
        self, method: str, target: str, line: str = "", *, patience: float | None = None
    ) -> tuple[dict[str, str], int]:
        """(header fields, length of the body) of the answer. A refusal raises ``TransferError`` with its reason."""
        try:
            self._socket.sendall(f"{method} {target} HTTP/1.1\r\n{self._head}{line}\r\n".encode())
        except OSError as error:
            raise _Broken(str(error)) from error
        while b"\r\n\r\n" not in self._received:
            if len(self._received) > _MAX_HEAD_BYTES:
                raise TransferError("the source does not speak this protocol: its answer has no end of header")
            part = bytearray(_MAX_HEAD_BYTES)
            self._received += part[: self._receive(memoryview(part), patience or self._patience, 0)]
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = _STATUS.match(first)
        length = fields.get("content-length", "0")
        if status is None or not length.isdecimal():
            raise TransferError(f"the source does not speak this protocol: it answered {first[:80]!r}")
        if int(status[1]) >= 300:
            raise TransferError(f"the source refused {target}: {self._reason(int(length)) or first}")
        return fields, int(length)

    def read(self, length: int) -> bytearray:
        body = bytearray(length)
        self.read_into(memoryview(body))
        return body

    def read_into(self, view: memoryview) -> None:
        """Fills ``view``."""
        if self._received:
            size = min(len(self._received), view.nbytes)
            view[:size] = self._received[:size]
            self._received = self._received[size:]
            view = view[size:]
        while view.nbytes:
            view = view[self._receive(view, self._patience, socket.MSG_WAITALL) :]

    def _receive(self, view: memoryview, patience: float, flags: int) -> int:
        seconds = min(patience, self._deadline.remaining())
        timeval = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            size = self._socket.recv_into(view, 0, flags)
        except BlockingIOError as error:
            self._deadline.remaining()
            raise _Broken(f"no byte came for {seconds:.1f} s") from error
        except OSError as error:
            raise _Broken(str(error)) from error
        if size == 0:
            raise _Broken("the source closed the connection")
        return size

    def _reason(self, length: int) -> str:
        body = self.read(min(length, _MAX_HEAD_BYTES))
        try:
            return str(msgpack.unpackb(body)["reason"])
        except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException):
            return ""

    def interrupt(self) -> None:
        """Ends what another thread does with this connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Fetch:
    """One state, from one source. ``run`` it once; ``abort`` it from any thread."""

    def __init__(
        self, base_url: str, step: int, timeout: float, *, token: ClientToken, streams: int, progress: Progress | None
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme != "http" or url.hostname is None or url.port is None:
            raise ValueError(f"{base_url!r} is not the address of a checkpoint server (http://host:port)")
        self._host, self._port, self._token = url.hostname, url.port, token
        self._step = step
        self._streams = max(1, min(streams, MAX_STREAMS))
        self._progress = progress
        self._deadline = _Deadline(timeout, f"step {step} from {base_url}")
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._ended: BaseException | None = None
        self._wake = threading.Event()
        self._torn = False
        self._damages: Counter[int] = Counter()
        self._bytes_done = 0

    def run(self, into: Any = None) -> Any:
        """The state. Raises ``TransferError``, ``TransferTimeout`` or ``ManifestError``."""
        try:
            self._retry(self._receive_manifest)
            try:
                self._destination = Destination(self._manifest.content, into)
                self._torn = self._destination.in_place_bytes > 0
                self._receive_chunks()
            finally:
                self._give_back_lease()
            return self._destination.result()
        except TransferError as error:
            error.torn = self._torn
            raise

    def abort(self, reason: str) -> None:
        """Makes ``run`` raise ``TransferError`` at once."""
        self._end(TransferError(f"receiving step {self._step} was aborted: {reason}"))

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._ended = self._ended or error
            self._wake.set()
            for connection in self._open:
                connection.interrupt()

    def _retry(self, work: Callable[[_Connection], None]) -> None:
        """Runs ``work`` to its end, again on a new connection each time that one breaks."""
        failures, bytes_done = 0, self._bytes_done
        while True:
            try:
                with self._connect() as connection:
                    return work(connection)
            except _Broken as error:
                if self._ended is not None:
                    raise self._ended from error
                failures = failures + 1 if self._bytes_done == bytes_done else 1
                bytes_done = self._bytes_done
                if failures == MAX_FAILURES:
                    raise TransferError(f"the source of step {self._step} is lost: {error}") from error
                log.info("transfer broken, going on", step=self._step, reason=str(error), failures=failures)
                self._wake.wait(min(FIRST_PAUSE_SECONDS * 2 ** (failures - 1), self._deadline.remaining()))

    @contextlib.contextmanager
    def _connect(self, patience: float = STALL_SECONDS) -> Iterator[_Connection]:
        connection = _Connection(self._host, self._port, self._token, self._deadline, patience)
        try:
            with self._lock:
                if self._ended is not None:
                    raise self._ended
                self._open.add(connection)
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
                connection.close()

    def _receive_manifest(self, connection: _Connection) -> None:
        remaining = self._deadline.remaining()
        wait = remaining * WAIT_SHARE
        fields, length = connection.ask("GET", f"/checkpoint/{self._step}?wait={wait:.3f}", patience=remaining)
        if length > MAX_MANIFEST_BYTES:
            raise ManifestError(f"manifest of {length} bytes; at most {MAX_MANIFEST_BYTES} are taken")
        self._manifest = read_manifest(bytes(connection.read(length)))
        if self._manifest.origin.step != self._step:
            raise ManifestError(f"asked for step {self._step}, got step {self._manifest.origin.step}")
        self._lease = fields.get("keepstep-lease", "")

    def _give_back_lease(self) -> None:
        """So that the source can reuse the memory at once, not only when the lease runs out."""
        try:
            with self._connect(GIVE_BACK_SECONDS) as connection:
                connection.ask("DELETE", f"/lease/{self._lease}")
        except (_Broken, TransferError) as error:
            log.info("could not give the lease back, it will run out", step=self._step, reason=str(error))

    def _receive_chunks(self) -> None:
        chunks = len(self._manifest.chunk_digests)
        length = chunks if self._streams == 1 else max(1, min(MAX_RUN_CHUNKS, chunks // (4 * self._streams)))
        self._runs = deque(range(first, min(first + length, chunks)) for first in range(0, chunks, max(1, length)))
        streams = min(self._streams, len(self._runs))
        if streams <= 1:
            self._receive_stream()
            return
        with ThreadPoolExecutor(streams, "keepstep-receive") as pool:
            for stream in [pool.submit(self._receive_stream) for _ in range(streams)]:
                stream.result()

    def _receive_stream(self) -> None:
        todo: deque[int] = deque()
        scratch = memoryview(bytearray(PIECE_BYTES))

        def work(connection: _Connection) -> None:
            while todo or self._take_run(todo):
                self._receive_run(connection, todo, scratch)

        try:
            self._retry(work)
        except BaseException as error:
            self._end(error)
            raise

    def _take_run(self, todo: deque[int]) -> bool:
        with self._lock:
            if self._runs:
                todo.extend(self._runs.popleft())
        return bool(todo)

    def _receive_run(self, connection: _Connection, todo: deque[int], scratch: memoryview) -> None:
        """Receives the chunks of ``todo``, which follow each other, and takes each out when it is verified."""
        first = todo[0] * CHUNK_BYTES
        last = min((todo[-1] + 1) * CHUNK_BYTES, self._destination.pack_bytes) - 1
        _, length = connection.ask("GET", f"/lease/{self._lease}", f"Range: bytes={first}-{last}\r\n")
        if length != last + 1 - first:
            raise TransferError(f"the source sends {length} bytes where {last + 1 - first} were asked for")
        while todo:
            chunk = todo[0]
            digest, size = self._receive_chunk(connection, chunk, scratch)
            if digest != self._manifest.chunk_digests[chunk]:
                self._note_damage(chunk)
            todo.popleft()
            with self._lock:
                self._bytes_done += size
                if self._progress is not None:
                    self._progress(self._bytes_done, self._destination.pack_bytes)

    def _note_damage(self, chunk: int) -> NoReturn:
        self._damages[chunk] += 1
        log.warning("chunk arrived damaged", step=self._step, chunk=chunk, times=self._damages[chunk])
        if self._damages[chunk] == MAX_DAMAGES:
            raise TransferError(f"chunk {chunk} of step {self._step} arrived damaged {MAX_DAMAGES} times")
        raise _Broken(f"chunk {chunk} arrived damaged")

    def _receive_chunk(self, connection: _Connection, chunk: int, scratch: memoryview) -> tuple[bytes, int]:
        """(digest, size) of a chunk received into its place. Short segments go through ``scratch``, many at a time."""
        hasher = xxhash.xxh3_128()
        short: list[memoryview] = []
        gathered = size = 0

        def receive(piece: memoryview) -> None:
            connection.read_into(piece)
            hasher.update(piece)

        def scatter() -> None:
            receive(scratch[:gathered])
            start = 0
            for segment in short:
                segment[:] = scratch[start : start + segment.nbytes]
                start += segment.nbytes
            short.clear()

        for segment in self._destination.segments(chunk):
            size += segment.nbytes
            if gathered and (segment.nbytes >= SHORT_BYTES or gathered + segment.nbytes > PIECE_BYTES):
                scatter()
                gathered = 0
            if segment.nbytes < SHORT_BYTES:
                short.append(segment)
                gathered += segment.nbytes
            else:
                for start in range(0, segment.nbytes, PIECE_BYTES):
                    receive(segment[start : start + PIECE_BYTES])
        if gathered:
            scatter()
        return hasher.digest(), size
