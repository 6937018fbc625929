"""An HTTP/1.1 connection over a blocking socket, which receives bodies directly into their final memory.

An event loop would copy the bodies once more, and its thread would compete with the trainer for the GIL.
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

from keepstep.connection.deadline import Deadline
from keepstep.runtime.connecting import connect
from keepstep.state.errors import TransferError, TransferTimeout
from keepstep_mesh.net.addresses import Lookup, in_url
from keepstep_mesh.net.fork_safety import open_socket

MAX_REASON_BYTES = 8192
MAX_JSON_BYTES = 64 << 20
QUEUE_FIELD = "Keepstep-Queue"
"""Header field. In a request: seconds between two queue reports (status 102). In a report: number of readers ahead."""
QUEUE_REPORT_SECONDS = 0.1
_MAX_HEAD_BYTES = 8192
_STATUS = re.compile(r"HTTP/1\.1 (\d{3})(?: |$)")
_NUMBER = re.compile(r"[0-9]{1,18}")
_SEND, _RECEIVE = socket.SO_SNDTIMEO, socket.SO_RCVTIMEO


class BrokenConnection(Exception):
    """The connection cannot be used any longer."""


class Refusal(TransferError):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds; 0: the answer has no Retry-After field."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, and the credentials for it.

    Args:
        headers: returns the header fields of a new connection, with the current token.
        tls: returns the TLS context of a new connection. None: the address is http.
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
        """Parse ``http://host:port``, or ``https://host:port`` if ``tls`` is given. Raises ``ValueError``."""
        url = urlsplit(address)
        schemes = ("http", "https") if tls else ("http",)
        if url.scheme not in schemes or url.hostname is None or url.port is None:
            raise ValueError(f"invalid address {address!r} of a checkpoint server: expected {schemes[-1]}://host:port")
        return cls(address, url.hostname, url.port, headers, tls if url.scheme == "https" else None)


class Connection:
    """A client connection to ``endpoint``. Call ``connect`` before any request.

    Every method raises ``BrokenConnection`` if the connection breaks or stalls, and ``TransferTimeout`` at the
    deadline.

    Args:
        patience: seconds without a byte, in either direction, after which the connection counts as broken.
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
        except (OSError, ValueError) as error:  # ValueError: invalid host name
            raise BrokenConnection(f"cannot connect to {to.address}: {error}") from error

    def _look_up(self) -> list[Any]:
        self._lookup = Lookup(self._endpoint.host, self._endpoint.port)
        self._end_if_interrupted()
        return self._lookup.result(self._wait_seconds())

    def _connect(self, unconnected: socket.socket, address: Any) -> None:
        self._socket.close()
        self._socket = unconnected
        connect(unconnected, address, self._wait_seconds(), self._end_if_interrupted)
        unconnected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._endpoint.tls is not None:
            self._socket = wrapped = self._endpoint.tls().wrap_socket(
                unconnected, server_hostname=self._endpoint.host, do_handshake_on_connect=False
            )
            self._end_if_interrupted()  # ``interrupt`` finds no descriptor during ``wrap_socket``
            wrapped.settimeout(self._wait_seconds())
            wrapped.do_handshake()
        self._socket.settimeout(None)

    def _wait_seconds(self) -> float:
        return min(self._patience, self._deadline.remaining())

    def _end_if_interrupted(self) -> None:
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")

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
        """Send a request, and read the head of the answer.

        Args:
            line: further header lines, each with its line end.
            patience: replaces the patience of the connection for this answer.
            queued: called for each report of the server that the request waits in its queue, which counts as progress.
                An error that it raises ends the wait. Default: request no reports.

        Returns:
            The header fields in lower case, and the length of the body.

        Raises:
            Refusal: the answer is an error.
        """
        if queued is not None:
            line += f"{QUEUE_FIELD}: {min(QUEUE_REPORT_SECONDS, self._deadline.seconds / 4):.3f}\r\n"
        if body is not None:
            line += f"Content-Length: {memoryview(body).nbytes}\r\n"
        self._send(f"{method} {target} HTTP/1.1\r\n{self._head}{line}\r\n".encode())
        if body is not None:
            with contextlib.suppress(BrokenConnection):  # the server may have answered before it read the whole body
                self._send(body)
        first, fields = self._read_head(patience or self._patience)
        while queued is not None and first.startswith("HTTP/1.1 102 "):
            self._deadline.progressed()
            queued()
            first, fields = self._read_head(patience or self._patience)
        status = _STATUS.match(first)
        length = fields.get("content-length", "0")
        if status is None or not _NUMBER.fullmatch(length):
            raise TransferError(f"the server does not speak this protocol: it answered {first[:80]!r}")
        if int(status[1]) >= 300:
            reason = self._reason(int(length)) or first
            after = fields.get("retry-after", "")
            seconds = float(after) if _NUMBER.fullmatch(after) else 0.0
            raise Refusal(int(status[1]), f"{method} {target} was refused: {reason}", seconds)
        return fields, int(length)

    def _read_head(self, patience: float) -> tuple[str, dict[str, str]]:
        while b"\r\n\r\n" not in self._received:
            if len(self._received) > _MAX_HEAD_BYTES:
                raise TransferError("the server does not speak this protocol: the header of its answer does not end")
            part = bytearray(_MAX_HEAD_BYTES)
            self._received += part[: self._receive(memoryview(part), patience, 0)]
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return first, {name.strip().lower(): value.strip() for name, _, value in pairs}

    def ask_json(self, method: str, target: str, plain: object = None, *, raw: bytes | None = None) -> dict[str, Any]:
        """Send ``plain`` as JSON, or the bytes ``raw``, and return the JSON object of the answer.

        Raises:
            TransferError: the answer is not a JSON object.
        """
        body, kind = (raw, "octet-stream") if raw is not None else (json.dumps(plain).encode(), "json")
        _, length = self.ask(method, target, f"Content-Type: application/{kind}\r\n", body=body)
        if length > MAX_JSON_BYTES:
            raise TransferError(f"answer to {method} {target} too large: {length} bytes (limit {MAX_JSON_BYTES})")
        try:
            answer = json.loads(bytes(self.read(length)))
        except (ValueError, RecursionError) as error:
            raise TransferError(f"the answer to {method} {target} is not JSON: {error}") from error
        if type(answer) is not dict:
            raise TransferError(f"the answer to {method} {target} is a {type(answer).__name__}, not a JSON object")
        return answer

    def read(self, length: int) -> bytearray:
        """Read ``length`` bytes of the body."""
        body = bytearray(length)
        self._fill(memoryview(body), lambda: None)
        return body

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with a part of the state. Each byte counts as progress."""
        self._fill(view, self._deadline.progressed)

    def _fill(self, view: memoryview, on_bytes: Callable[[], None]) -> None:
        if self._received:
            size = min(len(self._received), view.nbytes)
            view[:size] = self._received[:size]
            self._received = self._received[size:]
            view = view[size:]
        while view.nbytes:
            view = view[self._receive(view, self._patience, self._whole) :]
            on_bytes()

    def _send(self, data: bytes | memoryview) -> None:
        seconds = self._wait_seconds()
        try:
            self._limit(seconds, _SEND)
            self._socket.sendall(data)
        except (BlockingIOError, ssl.SSLWantWriteError) as error:
            self._deadline.remaining()
            raise BrokenConnection(f"the server accepted no byte for {seconds:.1f} s") from error
        except OSError as error:
            raise BrokenConnection(str(error)) from error

    def _receive(self, view: memoryview, patience: float, flags: int) -> int:
        """Receive at least one byte. Returns well before the deadline, so that the bytes count as progress."""
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
                    raise BrokenConnection(f"no byte received for {patience:.1f} s") from error
            except OSError as error:
                raise BrokenConnection(str(error)) from error
            else:
                if size == 0:
                    raise BrokenConnection("the server closed the connection")
                return size

    def _limit(self, seconds: float, option: int) -> None:
        """Set the timeout of the kernel. A Python socket with a timeout polls before each call."""
        timeval = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)

    def _reason(self, length: int) -> str:
        """Read the reason in a problem document, or in the msgpack body of a checkpoint server."""
        body = bytes(self.read(min(length, MAX_REASON_BYTES)))
        for unpack, name in ((json.loads, "detail"), (msgpack.unpackb, "reason")):
            with contextlib.suppress(
                ValueError, TypeError, KeyError, RecursionError, msgpack.exceptions.UnpackException
            ):
                return str(unpack(body)[name])
        return ""

    def interrupt(self) -> None:
        """End the call of another thread on this connection, including ``connect``."""
        self._interrupted = True
        if self._lookup is not None:
            self._lookup.interrupt()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # SSLSocket.shutdown would continue in plain text

    def close(self) -> None:
        self._socket.close()
