"""Forward REST requests from a standby to the leader: proxy short reads, redirect everything else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cached_property
from http import HTTPStatus

import aiohttp
from aiohttp import hdrs, web

from keepstep_mesh.net.http import Identity, Problem, read_answer
from keepstep_mesh.security.request_errors import explained
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.serving.application import Route

MAX_ANSWER_BYTES = 64 * 1024 * 1024
PASSED_ON = "X-Keepstep-Passed-On"
OWN_PATHS = ("/v1/cluster", "/openapi.json")
"""Paths that every lighthouse answers itself."""


class Forwarding:
    """Forward requests if another lighthouse leads.

    Args:
        leader_elsewhere: gives the address of the leader if it is another lighthouse.
        tls: for requests to it. They have the token of the client.
    """

    def __init__(self, leader_elsewhere: Callable[[], Awaitable[str | None]], tls: TlsFiles) -> None:
        self._leader_elsewhere = leader_elsewhere
        self._tls = tls

    def route(self, route: Route) -> Route:
        """Return ``route`` with a handler that forwards, unless every lighthouse answers it itself."""
        if route.path in OWN_PATHS:
            return route

        async def handle(request: web.Request) -> web.StreamResponse:
            if (leader := await self._leader_elsewhere()) is not None:
                return await _forward(request, leader, self._identity)
            return await route.handler(request)

        return replace(route, handler=handle)

    @cached_property
    def _identity(self) -> Identity:
        return Identity(None, self._tls)


async def _forward(request: web.Request, leader: str, identity: Identity) -> web.StreamResponse:
    """Return the leader's answer to a read; redirect every other request.

    Args:
        identity: without a token: the client's token is forwarded.

    Raises:
        Problem: the leader does not answer, answers with more than ``MAX_ANSWER_BYTES``, or does not lead either.
        web.HTTPTemporaryRedirect: the request is not a short read.
    """
    if request.method != hdrs.METH_GET or "follow" in request.query or request.path == "/":
        raise web.HTTPTemporaryRedirect(f"{leader}{request.rel_url}")
    if PASSED_ON in request.headers:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the lighthouses have not agreed on a leader yet; retry")
    headers = {PASSED_ON: "1"}
    if hdrs.AUTHORIZATION in request.headers:
        headers[hdrs.AUTHORIZATION] = request.headers[hdrs.AUTHORIZATION]
    try:
        async with identity.session(timeout=5.0) as http:
            answer = await http.get(f"{leader}{request.rel_url}", headers=headers, allow_redirects=False)
            body = await read_answer(answer, MAX_ANSWER_BYTES)
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = explained(error, leader)
        raise Problem(HTTPStatus.BAD_GATEWAY, f"the leader {leader} does not answer: {reason}") from error
