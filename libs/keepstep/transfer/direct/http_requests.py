"""Requests to the checkpoint server: reading, parsing and authorization.

    GET /checkpoint/<step>?wait=<seconds>   manifest of the step, and a lease on its bytes (header Keepstep-Lease)
    GET /content/<step>?wait=<seconds>      the same without the digests, before the bytes are hashed
    GET /manifest/<lease>                   manifest, when the bytes are hashed
    GET /lease/<lease>                      bytes of the pack; Range: bytes=<first>-<last>. Keepstep-Queue: <seconds>
                                            requests a queue report (status 102) at this interval
    DELETE /lease/<lease>                   end of the lease
    GET /holders/<lease>                    other readers of the same snapshot that serve chunks; see ``holders``
    GET /chunk/<digest>                     a chunk that this process, which heals, has already received

The body of an error is msgpack, {"reason": sentence}. Status: 400 (bad request), 401 (token), 403 and 421 (web page),
404 (not staged in time), 410 (no longer available), 416 (range), 422 (``CANNOT_BE_SENT``), 503 (unavailable).
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from keepstep.connection.http_connection import QUEUE_FIELD
from keepstep_mesh.protocol.manifest import DIGEST_BYTES
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.security.web_pages import HOST_ADVICE, host_problem, origin_problem

MAX_HEAD_BYTES = 8192
MIN_QUEUE_REPORT_SECONDS = 0.05

REQUEST_LINE = re.compile(
    r"(GET|DELETE) /(checkpoint|content|manifest|lease|holders|chunk)/([0-9a-zA-Z_-]{1,64})"
    r"(?:\?wait=(\d{1,9}(?:\.\d{1,9})?))? HTTP/1\.1"
)
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_SECONDS = re.compile(r"\d{1,3}\.\d{3}")


class RequestError(Exception):
    """An error answer to a request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Request:
    """A parsed and authorized request."""

    method: str
    kind: str
    """First part of the path: ``checkpoint``, ``lease`` ..."""
    name: str
    """Second part of the path: a step, the name of a lease, or a digest."""
    wait: float
    """Seconds to wait for the step."""
    fields: Mapping[str, str]
    """Header fields, in lower case."""

    @property
    def digest(self) -> bytes:
        """The digest in the path; empty: the path has none."""
        return bytes.fromhex(self.name) if _DIGEST.fullmatch(self.name) else b""

    @property
    def queue_report_seconds(self) -> float | None:
        """The interval of the queue reports that the reader requests. None: it requests none."""
        value = self.fields.get(QUEUE_FIELD.lower(), "")
        return max(MIN_QUEUE_REPORT_SECONDS, float(value)) if _SECONDS.fullmatch(value) else None

    def byte_range(self, length: int) -> tuple[int, int]:
        """Return the first and the last byte of the requested range of a pack of ``length`` bytes.

        Raises:
            RequestError: the range is missing, invalid or out of range.
        """
        value = self.fields.get("range")
        matched = _RANGE.fullmatch(value or "")
        first, last = (int(matched[1]), int(matched[2])) if matched else (0, -1)
        if not first <= last < length:
            raise RequestError(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                f"invalid range {value!r}: expected bytes=<first>-<last> within the {length} bytes of the pack",
            )
        return first, last


@dataclass(frozen=True)
class Access:
    """Decides which requests are authorized.

    Args:
        host: host name of the server.
        is_loopback: whether the server listens on a loopback address.
        token: token of the job. Empty: any request except those of web pages is authorized.
    """

    host: str
    is_loopback: bool
    token: ClientToken

    def check(self, fields: Mapping[str, str]) -> None:
        """Raise ``RequestError`` if a request with these header fields is not authorized."""
        if not self.token:
            own = (self.host,)
            problem = host_problem(fields.get("host"), own, HOST_ADVICE) if self.is_loopback else None
            if problem is not None:
                raise RequestError(HTTPStatus.MISDIRECTED_REQUEST, problem)
            if (problem := origin_problem(fields.get("origin"), own)) is not None:
                raise RequestError(HTTPStatus.FORBIDDEN, problem)
        if not self.token.accepts_peer(fields.get("authorization", "")):
            raise RequestError(HTTPStatus.UNAUTHORIZED, "the bearer token is missing or wrong")


async def read_head(loop: asyncio.AbstractEventLoop, connection: socket.socket, received: bytearray) -> bytes | None:
    """Read the head of the next request. Returns None when the client has closed the connection.

    Args:
        received: bytes of earlier reads that are not used yet; updated.
    """
    async with asyncio.timeout(10.0):
        while (end := received.find(b"\r\n\r\n")) < 0:
            if len(received) > MAX_HEAD_BYTES:
                raise RequestError(
                    HTTPStatus.BAD_REQUEST, f"head of the request too large (limit {MAX_HEAD_BYTES} bytes)"
                )
            data = await loop.sock_recv(connection, MAX_HEAD_BYTES)
            if not data:
                return None
            received += data
    head = bytes(received[:end])
    del received[: end + 4]
    return head


def parse_request(head: bytes, access: Access) -> Request:
    """Parse the head of a request, and check that it is authorized. Raises ``RequestError``."""
    first, *lines = head.decode("latin-1").split("\r\n")
    matched = REQUEST_LINE.fullmatch(first)
    if matched is None:
        raise RequestError(
            HTTPStatus.BAD_REQUEST,
            f"invalid request {first[:80]!r}: expected /checkpoint/<step>, /lease/<name> or /chunk/<digest>",
        )
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    access.check(fields)
    if fields.get("content-length", "0") != "0" or "transfer-encoding" in fields:
        raise RequestError(HTTPStatus.BAD_REQUEST, "requests with a body are not supported")
    method, kind, name, wait = matched.groups()
    return Request(method, kind, name, float(wait or 0), fields)
