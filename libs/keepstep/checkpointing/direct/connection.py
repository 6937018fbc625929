"""One HTTP/1.1 connection over a blocking socket: bodies go straight between the socket and the memory they belong in.

An event loop would copy them once more, and its thread would have to share the trainer's GIL for each piece.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgpack

from keepstep.checkpointing.errors import TransferError, TransferTimeout
from keepstep_mesh.net.addresses import Lookup, in_url
from keepstep_mesh.net.fork_safety import open_socket

MAX_REASON_BYTES = 8192
MAX_JSON_BYTES = 64 << 20
QUEUE_FIELD = "Keepstep-Queue"
"""Of a request: how often, in seconds, to say that it waits for its turn. In that word (status 102): how many readers
are before it.
"""
QUEUE_NEWS_SECONDS = 0.1
_MAX_HEAD_BYTES = 8192
_STATUS = re.compile(r"HTTP/1\.1 (\d{3})(?: |$)")
_NUMBER = re.compile(r"[0-9]{1,18}")
_SEND, _RECEIVE = socket.SO_SNDTIMEO, socket.SO_RCVTIMEO


class BrokenConnection(Exception):
    """The connection is of no use any more."""


class Refusal(TransferError):
    """The other side answered, and said no."""

    def __init__(self, status: int, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds; 0 where it did not say."""


class Deadline:
    """``seconds`` for all of it; with ``limit``, ``seconds`` without progress and ``limit`` seconds for all of it.

    Args:
        what: of which step, from where; for the message.
    """

    def __init__(self, seconds: float, what: str, limit: float | None = None) -> None:
        now = time.monotonic()
        self.seconds = seconds
        self._what = what
        self._limit = seconds if limit is None else limit
        self._last = now + self._limit
        self._end = min(now + seconds, self._last)

    def progressed(self) -> None:
        """From now on there are ``seconds`` again, up to the limit."""
        self._end = min(time.monotonic() + self.seconds, self._last)

    def remaining(self) -> float:
        """Seconds left, more than 0. Raises ``TransferTimeout`` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            stalled = self._end < self._last
            why = f": no progress for {self.seconds:.1f} s" if stalled else f" within {self._limit:.1f} s"
            raise TransferTimeout(self._what + why)
        return left


@dataclass(frozen=True)
class Endpoint:
    """Where to connect. ``headers``: told for each connection anew, so that a rotated token counts. ``tls``: likewise;
    None where the address is http.
    """

    address: str
    host: str
    port: int
    headers: Callable[[], Mapping[str, str]]
    tls: Callable[[], ssl.SSLContext] | None

    @classmethod
    def of(
        cls, address: str, headers: Callable[[], Mapping[str, str]], tls: Callable[[], ssl.SSLContext] | None = None
    ) -> Endpoint:
        """Raises ``ValueError`` for what is no ``http://host:port``, or ``https://`` where ``tls`` says how."""
        url = urlsplit(address)
        schemes = ("http", "https") if tls else ("http",)
        if url.scheme not in schemes or url.hostname is None or url.port is None:
            raise ValueError(f"{address!r} is not the address of a checkpoint server ({schemes[-1]}://host:port)")
        return cls(address, url.hostname, url.port, headers, tls if url.scheme == "https" else None)


class Connection:
    """To be connected first. Raises ``BrokenConnection`` when it breaks or stalls, ``TransferTimeout`` at the deadline.

    ``patience``: seconds without a byte, in either direction, after which it counts as broken.
    """

    def __init__(self, endpoint: Endpoint, deadline: Deadline, patience: float) -> None:
        self._endpoint = endpoint
        self._deadline = deadline
        self._patience = patience
        self._received = b""
        self._whole = 0 if endpoint.tls is not None else socket.MSG_WAITALL
        fields = {"Host": f"{in_url(endpoint.host)}:{endpoint.port}", **endpoint.headers()}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._interrupted = False
        self._lookup: Lookup | None = None
        self._socket = socket.socket()

    @property
    def address(self) -> str:
        return self._endpoint.address

    def connect(self) -> None:
        to = self._endpoint
        try:
            found = self._look_up()
            while found:
                family, kind, protocol, _, address = found.pop(0)
                try:
                    self._connect(open_socket(family, kind, protocol), address)
                    return
                except OSError:
                    if not found or self._interrupted:
                        raise
        except TransferTimeout:
            raise
        except (OSError, ValueError) as error:  # the latter for what cannot be a host
            raise BrokenConnection(f"cannot connect to {to.address}: {error}") from error

    def _look_up(self) -> list[Any]:
        seconds = min(self._patience, self._deadline.remaining())
        self._lookup = Lookup(self._endpoint.host, self._endpoint.port)
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")
        return self._lookup.result(seconds)

    def _connect(self, unconnected: socket.socket, address: Any) -> None:
        self._socket.close()
        self._socket = unconnected
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")
        self._socket.settimeout(min(self._patience, self._deadline.remaining()))
        self._socket.connect(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._endpoint.tls is not None:
            self._socket = wrapped = self._endpoint.tls().wrap_socket(
                self._socket, server_hostname=self._endpoint.host, do_handshake_on_connect=False
            )
            wrapped.do_handshake()  # by now ``interrupt`` ends it
        self._socket.settimeout(None)

    def ask(
        self,
        method: str,
        target: str,
        line: str = "",
        *,
        body: bytes | memoryview | None = None,
        patience: float | None = None,
        queued: Callable[[], None] | None = None,
    ) -> tuple[dict[str, str], int]:
        """(header fields, length of the body) of the answer. Raises ``Refusal`` with its reason.

        ``queued``: called each time that the other side says that the request waits there for its turn, which counts
        as progress; what it raises ends the wait. Without it the other side does not say so.
        """
        if queued is not None:
            line += f"{QUEUE_FIELD}: {min(QUEUE_NEWS_SECONDS, self._deadline.seconds / 4):.3f}\r\n"
        if body is not None:
            line += f"Content-Length: {memoryview(body).nbytes}\r\n"
        self._send(f"{method} {target} HTTP/1.1\r\n{self._head}{line}\r\n".encode())
        if body is not None:
            with contextlib.suppress(BrokenConnection):  # it may have said no, and why, without taking all of it
                self._send(body)
        first, fields = self._read_head(patience or self._patience)
        while queued is not None and first.startswith("HTTP/1.1 102 "):
            self._deadline.progressed()
            queued()
            first, fields = self._read_head(patience or self._patience)
        status = _STATUS.match(first)
        length = fields.get("content-length", "0")
        if status is None or not _NUMBER.fullmatch(length):
            raise TransferError(f"the other side does not speak this protocol: it answered {first[:80]!r}")
        if int(status[1]) >= 300:
            reason = self._reason(int(length)) or first
            after = fields.get("retry-after", "")
            seconds = float(after) if _NUMBER.fullmatch(after) else 0.0
            raise Refusal(int(status[1]), f"{method} {target} was refused: {reason}", seconds)
        return fields, int(length)

    def _read_head(self, patience: float) -> tuple[str, dict[str, str]]:
        while b"\r\n\r\n" not in self._received:
            if len(self._received) > _MAX_HEAD_BYTES:
                raise TransferError("the other side does not speak this protocol: its answer has no end of header")
            part = bytearray(_MAX_HEAD_BYTES)
            self._received += part[: self._receive(memoryview(part), patience, 0)]
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return first, {name.strip().lower(): value.strip() for name, _, value in pairs}

    def ask_json(self, method: str, target: str, plain: object = None, *, raw: bytes | None = None) -> dict[str, Any]:
        """The JSON object that answers ``plain``, sent as JSON, or ``raw``, sent as it is. ``TransferError`` for
        another answer.
        """
        body, kind = (raw, "octet-stream") if raw is not None else (json.dumps(plain).encode(), "json")
        _, length = self.ask(method, target, f"Content-Type: application/{kind}\r\n", body=body)
        if length > MAX_JSON_BYTES:
            raise TransferError(
                f"{method} {target} was answered with {length} bytes; at most {MAX_JSON_BYTES} are taken"
            )
        try:
            answer = json.loads(bytes(self.read(length)))
        except (ValueError, RecursionError) as error:
            raise TransferError(f"{method} {target} was not answered with JSON: {error}") from error
        if type(answer) is not dict:
            raise TransferError(f"{method} {target} was answered with {type(answer).__name__}, not an object")
        return answer

    def read(self, length: int) -> bytearray:
        body = bytearray(length)
        self._fill(memoryview(body), lambda: None)
        return body

    def read_into(self, view: memoryview) -> None:
        """Fills ``view`` with a part of the state: each byte of it is progress."""
        self._fill(view, self._deadline.progressed)

    def _fill(self, view: memoryview, came: Callable[[], None]) -> None:
        if self._received:
            size = min(len(self._received), view.nbytes)
            view[:size] = self._received[:size]
            self._received = self._received[size:]
            view = view[size:]
        while view.nbytes:
            view = view[self._receive(view, self._patience, self._whole) :]
            came()

    def _send(self, data: bytes | memoryview) -> None:
        seconds = min(self._patience, self._deadline.remaining())
        try:
            self._limit(seconds, _SEND)
            self._socket.sendall(data)
        except (BlockingIOError, ssl.SSLWantWriteError) as error:
            self._deadline.remaining()
            raise BrokenConnection(f"nothing was taken for {seconds:.1f} s") from error
        except OSError as error:
            raise BrokenConnection(str(error)) from error

    def _receive(self, view: memoryview, patience: float, flags: int) -> int:
        """At least one byte. What has come is returned well before the deadline, so that it counts as progress."""
        now = time.monotonic()
        broken_at = now + patience
        while True:
            seconds = min(broken_at - now, self._deadline.remaining(), self._deadline.seconds / 4)
            try:
                self._limit(max(seconds, 0.0), _RECEIVE)
                size = self._socket.recv_into(view, 0, flags)
            except (BlockingIOError, ssl.SSLWantReadError) as error:
                now = time.monotonic()
                self._deadline.remaining()
                if now >= broken_at:
                    raise BrokenConnection(f"no byte came for {patience:.1f} s") from error
            except OSError as error:
                raise BrokenConnection(str(error)) from error
            else:
                if size == 0:
                    raise BrokenConnection("the other side closed the connection")
                return size

    def _limit(self, seconds: float, option: int) -> None:
        """The kernel's own timeout: a socket of Python's with one polls before each call."""
        timeval = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)

    def _reason(self, length: int) -> str:
        """Out of a problem document, or the msgpack of a trainer's server."""
        body = bytes(self.read(min(length, MAX_REASON_BYTES)))
        for unpack, name in ((json.loads, "detail"), (msgpack.unpackb, "reason")):
            with contextlib.suppress(
                ValueError, TypeError, KeyError, RecursionError, msgpack.exceptions.UnpackException
            ):
                return str(unpack(body)[name])
        return ""

    def interrupt(self) -> None:
        """Ends what another thread does with this connection, be it connecting."""
        self._interrupted = True
        if self._lookup is not None:
            self._lookup.interrupt()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of TLS would go on in plain text

    def close(self) -> None:
        self._socket.close()
