"""HTTP of the mesh: client sessions, answers within limits, errors as problem details (RFC 9457)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from yarl import URL

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import AuthError, KeepstepError, ProtocolError
from keepstep_mesh.net.fork_safety import open_socket
from keepstep_mesh.protocol.messages import PROTOCOL_VERSION
from keepstep_mesh.security.tls import TlsFiles, as_safe, watched_client_context
from keepstep_mesh.security.tokens import ClientToken, derived, place_of
from keepstep_mesh.text import printable

log = get_logger("keepstep.http")

PROBLEM_JSON = "application/problem+json"
KIND_HEADER = "Keepstep-For"
"""Header of a request: the kind of service that it is for (``lighthouse``, ``relay``, ``metrics``)."""
PROTOCOL_HEADER = "Keepstep-Protocol"
"""Header of a request: ``PROTOCOL_VERSION`` of the client. Browsers do not send it."""
MAX_PROBLEM_BYTES = 64 * 1024
PROBLEM_SECONDS = 5.0
"""Longest that the reason of a refusal may take to come."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Of an answer in JSON, unless the client says otherwise."""
REQUEST_SECONDS = 30.0

UNCOMPRESSED = {hdrs.ACCEPT_ENCODING: "identity"}
"""A body that is not decompressed cannot grow beyond the limit of an answer."""


class Problem(KeepstepError):
    """An HTTP error with its problem details, on either side.

    A handler raises it; the client gets it back from ``raise_for_problem``. ``fields`` travel as extra members.
    ``retry_after``: seconds after which it may be different, for the header and for ``fields``.
    """

    def __init__(
        self, status: int, detail: str, *, title: str = "", retry_after: float | None = None, **fields: Any
    ) -> None:
        super().__init__(detail or title or str(status))
        self.status = status
        self.title = title or _phrase(status)
        self.detail = detail
        self.fields = fields if retry_after is None else {**fields, "retry_after": retry_after}

    def response(self) -> web.Response:
        body = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail} | self.fields
        headers = {hdrs.WWW_AUTHENTICATE: "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else {}
        if "retry_after" in self.fields:
            headers[hdrs.RETRY_AFTER] = str(math.ceil(self.fields["retry_after"]))
        return web.json_response(body, status=self.status, content_type=PROBLEM_JSON, headers=headers)


def connector(tls: ssl.SSLContext | None = None) -> aiohttp.TCPConnector:
    """Of every client session of ours: no forked child keeps its connections. ``tls``: see ``client_session``."""
    return aiohttp.TCPConnector(ssl=tls or True, socket_factory=lambda address: open_socket(*address[:3]))


def client_session(
    token: str | None = None,
    *,
    timeout: float | None = REQUEST_SECONDS,
    tls: ssl.SSLContext | None = None,
    kind: str = "",
) -> aiohttp.ClientSession:
    """A session for talking to services of the mesh. ``timeout``: seconds for a whole request, None for no limit.

    ``tls``: for https addresses; None trusts the CAs of the system. Proxies of the environment are not used: the mesh
    is one network. ``kind``: a service of another kind refuses the requests (``KIND_HEADER``); empty: none does.
    """
    return aiohttp.ClientSession(
        connector=connector(tls),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=5.0),
        headers=UNCOMPRESSED
        | {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}
        | ({KIND_HEADER: kind} if kind else {})
        | ({hdrs.AUTHORIZATION: f"Bearer {token}"} if token else {}),
        auto_decompress=False,
    )


class Identity:
    """Token and certificates of a client; changed files are reloaded before each session.

    ``token``: a token, or a function that returns the current one. ``tls``: without files the CAs of the system are
    trusted. Raises ``TlsError`` if a certificate or key is invalid.
    """

    def __init__(
        self, token: str | ClientToken | Callable[[], str | None] | None = None, tls: TlsFiles | None = None
    ) -> None:
        self._token = token if callable(token) else ClientToken.of(token).latest
        self._certificates = watched_client_context(tls or TlsFiles())

    def session(
        self, *, timeout: float | None = REQUEST_SECONDS, place: str | None = None, kind: str = ""
    ) -> aiohttp.ClientSession:
        """See ``client_session``. ``place`` (``place_of``): send a token derived for it; None: the token itself."""
        token = self._token()
        if token and place is not None:
            token = derived(token, place)
        if self._certificates is None:
            return client_session(token, timeout=timeout, kind=kind)
        self._certificates.refresh()
        return client_session(token, timeout=timeout, tls=self._certificates.value, kind=kind)

    def headers_for(self, kind: str, address: str) -> dict[str, str]:
        """For one request to a service whose address a lighthouse told."""
        token = self._token()
        return {hdrs.AUTHORIZATION: f"Bearer {derived(token, place_of(kind, address))}"} if token else {}


async def raise_for_problem(response: aiohttp.ClientResponse) -> None:
    """Raise ``AuthError`` for status 401 or 403, and ``Problem`` for any other status of at least 400."""
    if response.status < 400:
        return
    text = (await _beginning(response)).decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {"detail": text.strip()[:500]}
    title, detail = (printable(str(body.pop(name, ""))) for name in ("title", "detail"))
    if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise AuthError(f"{response.url.origin()}: {detail or title or 'not authorized'}")
    for known in ("type", "status"):
        body.pop(known, None)
    raise Problem(response.status, detail, title=title, **{str(name): value for name, value in body.items()})


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Of the body: what comes of it in time, up to ``MAX_PROBLEM_BYTES``."""
    body = bytearray()
    try:
        async with asyncio.timeout(PROBLEM_SECONDS):
            async for part in response.content.iter_any():
                body += part
                if len(body) >= MAX_PROBLEM_BYTES:
                    break
    except (TimeoutError, aiohttp.ClientError):
        log.debug("the reason of a refusal broke off", url=str(response.url))
    return bytes(body[:MAX_PROBLEM_BYTES])


async def read_answer(answer: aiohttp.ClientResponse, limit: int = MAX_ANSWER_BYTES) -> bytes:
    """The body of an answer. ``Problem`` 502 when it has more than ``limit`` bytes; the session has the deadline."""
    body = bytearray()
    if (answer.content_length or 0) <= limit:
        async for part in answer.content.iter_any():
            body += part
            if len(body) > limit:
                break
        else:
            return bytes(body)
    answer.close()
    raise Problem(HTTPStatus.BAD_GATEWAY, f"answer of {answer.url} too large (limit {limit} bytes)")


async def read_json_answer(answer: aiohttp.ClientResponse, limit: int = MAX_ANSWER_BYTES) -> dict[str, Any]:
    """The JSON object that is the body of an answer. ``Problem`` 502 when it is none, or larger than ``limit``."""
    raw = await read_answer(answer, limit)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Problem(HTTPStatus.BAD_GATEWAY, f"{answer.url} does not answer with a JSON object")
    return found


def leader_of(answer: aiohttp.ClientResponse) -> str | None:
    """Return the base URL of the leader from a redirect (307, 308); None for any other answer.

    Follow the redirect with ``allow_redirects=False``: aiohttp drops the token on a redirect to another address.
    """
    if answer.status not in (HTTPStatus.TEMPORARY_REDIRECT, HTTPStatus.PERMANENT_REDIRECT):
        return None
    try:
        leader = str(answer.url.join(URL(answer.headers.get(hdrs.LOCATION, ""))).origin())
    except ValueError as error:
        raise ProtocolError(f"{answer.url.origin()} redirects to an invalid address: {error}") from error
    return as_safe(leader, str(answer.url))


@contextlib.asynccontextmanager
async def answer_of_leader(
    http: aiohttp.ClientSession, method: str, lighthouse: str, path: str, **how: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request to ``lighthouse``, or to the leader that it names, and yield the answer.

    ``how``: as for ``http.request``. Raises ``Problem`` 503 if the other lighthouse does not lead either.
    """
    for _ in range(2):
        async with http.request(method, f"{lighthouse}{path}", allow_redirects=False, **how) as answer:
            if (leader := leader_of(answer)) is None:
                yield answer
                return
            lighthouse = leader
    raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "no lighthouse leads yet; retry", retry_after=1.0)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "error"
