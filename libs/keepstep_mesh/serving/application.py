"""The HTTP application of a service: routes with the access that they need, bodies within limits, an audit log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import AuthError, ProtocolError
from keepstep_mesh.net.http import PROTOCOL_HEADER, Problem
from keepstep_mesh.protocol.messages import OLDEST_PROTOCOL_VERSION
from keepstep_mesh.security.tokens import Access, ForbiddenError, Role, Token, Tokens
from keepstep_mesh.security.web_pages import MisdirectedError, host_problem, origin_problem

log = get_logger("keepstep.http")
audit = get_logger("keepstep.audit")

MAX_BODY_BYTES = 1024 * 1024
"""Of a request, unless the service says otherwise."""
BODY_SECONDS = 10.0
"""Longest that the body of a request may take to come."""
MAX_VERSION_DIGITS = 9
MAX_REFUSED_ADDRESSES = 1000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, in lines of the audit log.

    ``role`` and ``name`` are those of its token; None and empty without a valid token. ``certificate``: the common name
    (else the first alternative name) of its certificate, with mutual TLS.
    """

    remote: str
    role: Role | None = None
    name: str = ""
    certificate: str = ""

    def __str__(self) -> str:
        """``admin alice (certificate ops.example) at 10.0.0.7``."""
        words = [self.role.value if self.role else "nobody", self.name]
        words += [f"(certificate {self.certificate})" if self.certificate else "", "at", self.remote]
        return " ".join(word for word in words if word)


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
    refusals = LogLimiter(seconds=10.0, max_keys=MAX_REFUSED_ADDRESSES)
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
        _check_protocol(request)
        if token is not None:
            request[ROLE], request[CALLER] = token.role, _caller(request, token)
        if route.is_order or route.access is Access.ADMIN:
            return await _audited(request, route)
        return await route.handler(request)

    return handle


def _check_protocol(request: web.Request) -> None:
    """Raise ``Problem`` 426 if a service or worker of keepstep asks that is too old."""
    version = request.headers.get(PROTOCOL_HEADER, "")
    if version.isdecimal() and int(version[:MAX_VERSION_DIGITS]) < OLDEST_PROTOCOL_VERSION:
        raise Problem(
            HTTPStatus.UPGRADE_REQUIRED,
            f"the client speaks protocol {version[:MAX_VERSION_DIGITS]}, this service needs at least "
            f"{OLDEST_PROTOCOL_VERSION}: update keepstep at {request.remote}",
        )


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
