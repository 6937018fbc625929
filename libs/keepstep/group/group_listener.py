"""The HTTP server of a group: it listens, and refuses requests without the job's token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from aiohttp import web

from keepstep_mesh.net.addresses import in_url
from keepstep_mesh.net.fork_safety import listening_socket
from keepstep_mesh.net.http import Problem
from keepstep_mesh.net.malformed_requests import server_log
from keepstep_mesh.security.tokens import ClientToken, is_loopback
from keepstep_mesh.security.web_pages import HOST_ADVICE, host_problem, origin_problem
from keepstep_mesh.serving.open_port import FIRST_REQUEST_SECONDS, FirstRequestLimit

MAX_BODY_BYTES = 2 << 20


class GroupListener:
    """Serves ``routes`` at one address. All methods run on one loop.

    Args:
        host: address to advertise and to bind to.
        port: 0: any free one.
        token: of the job; empty: requests are accepted from programs on this machine or network, not from web pages.
        routes: without a token only ``/healthz`` is open.
    """

    def __init__(self, host: str, port: int, token: ClientToken, routes: Sequence[web.AbstractRouteDef]) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._routes = routes
        self._on_loopback = False
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen, and return the address as ``http://host:port``. OSError when the port is in use."""
        limit = FirstRequestLimit(FIRST_REQUEST_SECONDS)
        app = web.Application(middlewares=[limit.middleware, self._authorize], client_max_size=MAX_BODY_BYTES)
        app.add_routes(self._routes)
        self._runner = web.AppRunner(app, access_log=None, logger=server_log, shutdown_timeout=1.0)
        await self._runner.setup()
        listener = listening_socket(self._host, self._port)  # blocks only for a name; the loop does nothing else yet
        self._server = await asyncio.get_running_loop().create_server(limit.acceptor(self._runner), sock=listener)
        bound, port = self._server.sockets[0].getsockname()[:2]
        self._on_loopback = is_loopback(bound)
        return f"http://{in_url(self._host)}:{port}"

    def stop_listening(self) -> None:
        """Refuse new connections. Those that are open stay."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Stop listening and end all connections. May be called more than once."""
        self.stop_listening()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._token:
            own = (self._host,)
            wrong = host_problem(request.headers.get("Host"), own, HOST_ADVICE) if self._on_loopback else None
            if wrong is not None:
                return Problem(HTTPStatus.MISDIRECTED_REQUEST, wrong).response()
            if (wrong := origin_problem(request.headers.get("Origin"), own)) is not None:
                return Problem(HTTPStatus.FORBIDDEN, wrong).response()
        if request.path != "/healthz" and not self._token.accepts_peer(request.headers.get("Authorization", "")):
            return Problem(HTTPStatus.UNAUTHORIZED, "wrong or missing token").response()
        return await handler(request)
