"""The open port of a service: bind, accept, close connections that send no request, replace certificates."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.typedefs import Middleware

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.fork_safety import claim, listening_socket
from keepstep_mesh.serving.application import Handler

FIRST_REQUEST_SECONDS = 10.0
"""Limit from accepting a connection to its first request. Without it an idle connection holds a descriptor forever."""
LINGER_SECONDS = 1.0
"""Time for a peer to finish sending a request that was already answered, and for the closing handshake of TLS."""
BACKLOG = 4096

log = get_logger("keepstep.service")


class BindError(KeepstepError):
    """The service cannot listen on its address."""


@contextlib.contextmanager
def listening(name: str, host: str, port: int) -> Iterator[socket.socket]:
    """Bind the listening socket of service ``name``.

    Raises:
        BindError: with what to do.
    """
    try:
        listener = listening_socket(host, port, BACKLOG)
    except OSError as error:
        advice = {
            errno.EADDRINUSE: "address in use; stop what listens there or choose another port (0: any free one)",
            errno.EACCES: "permission denied; choose a port above 1023",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
        }.get(error.errno or 0, error.strerror or str(error))
        raise BindError(f"{name} cannot listen on {host}:{port}: {advice}") from error
    with listener:
        yield listener


class OpenPort:
    """Accepts connections on ``listener`` and replaces certificates without closing the port."""

    def __init__(
        self, accept: Callable[[], asyncio.BaseProtocol], listener: socket.socket, handshake_seconds: float
    ) -> None:
        self.accept = accept
        self.listener = listener
        self.handshake_seconds = handshake_seconds
        self._server: asyncio.Server | None = None

    async def open(self, context: ssl.SSLContext | None) -> None:
        """Start to accept with ``context``; open connections keep the one they have. Call again to replace it."""
        # A copy of the descriptor: the port accepts connections while the servers are exchanged.
        listener = self.listener.dup()
        claim(listener)
        server = await asyncio.get_running_loop().create_server(
            self.accept,
            sock=listener,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=self.handshake_seconds if context else None,
            ssl_shutdown_timeout=LINGER_SECONDS if context else None,
            start_serving=False,
        )
        before, self._server = self._server, server
        try:
            await server.start_serving()
        finally:
            if before is not None:
                before.close()

    def close(self) -> None:
        """Stop accepting connections."""
        self.listener.close()
        if self._server is not None:
            self._server.close()


async def adopt(
    accept: Callable[[], asyncio.BaseProtocol],
    connection: socket.socket,
    context: ssl.SSLContext | None,
    handshake_seconds: float,
) -> asyncio.BaseTransport | None:
    """Serve an accepted connection with the protocol that ``accept`` creates. Return None if it has ended already."""
    connection.setblocking(False)
    try:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            accept,
            connection,
            ssl=context,
            ssl_handshake_timeout=handshake_seconds if context else None,
            ssl_shutdown_timeout=LINGER_SECONDS if context else None,
        )
    except OSError as error:  # also of the handshake, and its timeout
        log.debug("connection failed", reason=str(error))
        connection.close()
        return None
    return transport


class FirstRequestLimit:
    """Closes connections that send no request within ``seconds`` after they were accepted."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._idle: set[asyncio.BaseProtocol] = set()

    @property
    def middleware(self) -> Middleware:
        """Exempts each connection from the limit with its first request."""

        @web.middleware
        async def on_request(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._idle.discard(request.protocol)
            return await handler(request)

        return on_request

    def acceptor(self, runner: web.AppRunner | web.ServerRunner) -> Callable[[], asyncio.BaseProtocol]:
        """The protocol factory of ``runner``, which must be set up, with the limit applied to each connection."""
        create = runner.server
        if create is None:
            raise RuntimeError("call runner.setup() first")
        loop = asyncio.get_running_loop()

        def accept() -> asyncio.BaseProtocol:
            connection = create()
            self._idle.add(connection)
            loop.call_later(self._seconds, self._close_idle, connection)
            return connection

        return accept

    def _close_idle(self, connection: web.RequestHandler) -> None:
        if connection in self._idle:
            self._idle.discard(connection)
            if connection.transport is not None:
                connection.transport.abort()
