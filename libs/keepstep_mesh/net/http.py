"""HTTP of the mesh: client sessions, routes with the access they need, errors as problem details (RFC 9457)."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from yarl import URL

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import AuthError, KeepstepError, ProtocolError
from keepstep_mesh.net.fork_safety import open_socket
from keepstep_mesh.security.audit import Caller
from keepstep_mesh.security.tls import TlsFiles, as_safe, watched_client_context
from keepstep_mesh.security.tokens import Access, ClientToken, ForbiddenError, Role, Token, Tokens, derived, place_of
from keepstep_mesh.security.web_pages import MisdirectedError, host_problem, origin_problem

log = get_logger("keepstep.http")
audit = get_logger("keepstep.audit")

PROBLEM_JSON = "application/problem+json"
KIND_HEADER = "Keepstep-For"
"""Header of a request: the kind of service that it is for (``lighthouse``, ``relay``, ``metrics``)."""
MAX_BODY_BYTES = 1024 * 1024
"""Of a request, unless the service says otherwise."""
MAX_PROBLEM_BYTES = 64 * 1024
PROBLEM_SECONDS = 5.0
"""Longest that the reason of a refusal may take to come."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Of an answer in JSON, unless the client says otherwise."""
HTTP_CONNECT_SECONDS = 5.0
REFUSAL_LOG_SECONDS = 10.0
"""Interval of log lines about refused requests of one address; the next line counts those in between."""
MAX_REFUSED_ADDRESSES = 1000
REQUEST_SECONDS = 30.0
BODY_SECONDS = 10.0
"""Longest that the body of a request may take to come."""

UNCOMPRESSED = {hdrs.ACCEPT_ENCODING: "identity"}
"""A body that is not decompressed cannot grow beyond the limit of an answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=HTTP_CONNECT_SECONDS),
        headers=UNCOMPRESSED
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
    title, detail = str(body.pop("title", "")), str(body.pop("detail", ""))
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
    raise Problem(HTTPStatus.BAD_GATEWAY, f"answer of {answer.url} too large: at most {limit} bytes are read")


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


@dataclass(frozen=True, slots=True)
class Route:
    """One row of a service's authorization table; the rows are what the OpenAPI description is made of, too."""

    method: str
    path: str
    handler: Handler
    access: Access
    summary: str = ""
    is_order: bool = False
    """Written into the audit log, as whatever needs an admin is."""


ROLE = web.RequestKey("role", Role)
"""``request[ROLE]``: the role that asks; not there on an open route."""
CALLER = web.RequestKey("caller", Caller)
"""``request[CALLER]``: who asks, for people; not there on an open route."""
CERTIFICATE = web.RequestKey("certificate", str)
"""``request[CERTIFICATE]``: name in the client's certificate, if another process of the service has the connection."""


def application(
    routes: Iterable[Route],
    tokens: Callable[[], Tokens],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    loopback: bool = False,
    allow_hosts: Collection[str] = (),
    places: Callable[[], Collection[str]] = tuple,
) -> web.Application:
    """Return an application that enforces the access of each route and answers errors with problem details.

    ``tokens``: returns the current ones. ``loopback``: the service listens on loopback only; without tokens it then
    accepts requests to loopback and ``allow_hosts`` only. ``places``: derived tokens of these places are accepted.
    """
    gate = _Gate(tokens, loopback, allow_hosts, places)
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_problems])
    refusals = LogLimiter(REFUSAL_LOG_SECONDS, max_keys=MAX_REFUSED_ADDRESSES)
    for route in routes:
        app.router.add_route(route.method, route.path, _guarded(route, gate, refusals))
    return app


def _guarded(route: Route, gate: _Gate, refusals: LogLimiter) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            token = gate.check(request, route.access)
        except AuthError as error:
            who = _caller(request, getattr(error, "token", None))
            left_out = refusals.take(time.monotonic(), who.remote)
            if left_out is not None:
                audit.warning(
                    "refused",
                    by=str(who),
                    method=route.method,
                    path=request.path,
                    reason=str(error),
                    left_out=left_out,
                )
            raise
        if token is not None:
            request[ROLE], request[CALLER] = token.role, _caller(request, token)
        if route.is_order or route.access is Access.ADMIN:
            return await _audited(request, route)
        return await route.handler(request)

    return handle


@dataclass(frozen=True, slots=True)
class _Gate:
    """See ``application``."""

    tokens: Callable[[], Tokens]
    loopback: bool
    allow_hosts: Collection[str]
    places: Callable[[], Collection[str]]

    def check(self, request: web.Request, access: Access) -> Token | None:
        """Return the token of the client; None for an open route. Raises ``AuthError``."""
        tokens = self.tokens()
        if self.loopback and not tokens:
            problem = host_problem(request.headers.get(hdrs.HOST), self.allow_hosts)
            if problem is not None:
                raise MisdirectedError(problem)
        token = tokens.check(request.headers.get(hdrs.AUTHORIZATION), access, self.places())
        if token is not None and not tokens:
            problem = origin_problem(request.headers.get(hdrs.ORIGIN), self.allow_hosts)
            if problem is not None:
                raise ForbiddenError(problem)
        return token


async def _audited(request: web.Request, route: Route) -> web.StreamResponse:
    """An order is logged, whatever becomes of it."""
    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    try:
        response = await route.handler(request)
        status = response.status
        return response
    except Problem as problem:
        status = problem.status
        raise
    finally:
        who = str(request.get(CALLER) or _caller(request, None))
        audit.info("order", by=who, method=route.method, path=request.path, status=int(status))


def _caller(request: web.Request, token: Token | None) -> Caller:
    known = token.role if token else None, token.name if token else ""
    name = request[CERTIFICATE] if CERTIFICATE in request else certificate_name(request)
    return Caller(request.remote or "", *known, certificate=name)


def certificate_name(request: web.BaseRequest) -> str:
    """Return the name in the certificate of the client; empty: it has shown none."""
    certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
    return _name_in(certificate or {})


def _name_in(certificate: Mapping[str, Any]) -> str:
    """The common name, else the first alternative name; ``certificate`` as ``SSLSocket.getpeercert`` gives it."""
    names = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return next(iter((*names, *(value for _, value in certificate.get("subjectAltName", ())))), "")


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        return problem.response()
    except ForbiddenError as error:
        return Problem(HTTPStatus.FORBIDDEN, str(error)).response()
    except MisdirectedError as error:
        return Problem(HTTPStatus.MISDIRECTED_REQUEST, str(error)).response()
    except AuthError as error:
        return Problem(HTTPStatus.UNAUTHORIZED, str(error)).response()
    except ProtocolError as error:
        return Problem(HTTPStatus.BAD_REQUEST, str(error)).response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = Problem(error.status, _explained(request, error)).response()
        if hdrs.ALLOW in error.headers:
            answer.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
        return answer
    except web.RequestPayloadError as error:
        return Problem(HTTPStatus.BAD_REQUEST, f"the body cannot be read: {error}").response()
    except ConnectionError as error:
        log.debug("the client is gone", path=request.path, reason=str(error))
        return web.Response(status=HTTPStatus.BAD_REQUEST)  # the client has gone
    except Exception:
        log.exception("request failed", method=request.method, path=request.path)
        return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the service; its log has the traceback").response()


def _explained(request: web.Request, error: web.HTTPException) -> str:
    if error.status == HTTPStatus.NOT_FOUND:
        return f"path {request.path} not found"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} does not take {request.method}; it takes {', '.join(sorted(error.allowed_methods))}"
    return error.text or error.reason


async def read_whole(request: web.Request) -> bytes:
    """The body. 413 when it is too large; ``Problem`` 408 when it does not come within ``BODY_SECONDS``."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise Problem(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_SECONDS:g} s") from None


async def read_json(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body; ``{}`` for none.

    ``Problem`` 400 for anything else, 413 when it is too large, 408 when it does not come.
    """
    raw = await read_whole(request)
    if not raw:
        return {}
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and cannot be passed on
    except (ValueError, RecursionError) as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {str(error) or type(error).__name__}") from error
    if not isinstance(body, dict):
        raise Problem(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
    return body


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "error"
