"""For tests of what is built on the mesh: a network that misbehaves on demand, and a lighthouse that follows a script.

Use the real lighthouse wherever it will do; the scripted one is for what a real one never says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from keepstep_mesh.net.websocket import Link
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import Member
from keepstep_mesh.protocol.messages import (
    PROTOCOL_VERSION,
    Goodbye,
    Hello,
    Leave,
    Quorum,
    QuorumRequest,
    Welcome,
)
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Access, Tokens
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Service, serving

DEADLINE = 30.0
"""Seconds that a test waits for anything: generous, because the machine may be busy."""
_CHUNK_BYTES = 64 * 1024

M = TypeVar("M", bound=codec.Message)


@dataclass(slots=True)
class _Pair:
    """A connection of a client, and the one that was opened for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    opening: bytes = b""
    """First bytes from the client."""

    def abort(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.transport.abort()


class ChaosProxy:
    """A TCP proxy on a free port of loopback: ``async with ChaosProxy(host, port) as proxy: ...``.

    It forwards bytes without reading them. ``port`` is its port, ``connections`` the number of accepted connections.

    Args:
        host: of the server behind the proxy.
        port: of that server.
        scheme: of ``url``.
    """

    def __init__(self, host: str, port: int, scheme: str = "http") -> None:
        self._target = host, port
        self._scheme = scheme
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refused: bytes | None = None
        self._pairs: dict[asyncio.Task[None], _Pair] = {}
        self._server: asyncio.Server
        self.port = 0
        self.connections = 0
        """Accepted so far."""

    @classmethod
    def before(cls, url: str) -> ChaosProxy:
        """Return a proxy for a URL.

        Args:
            url: ``http://host:port`` or ``https://host:port``.

        Raises:
            ValueError: ``url`` has no host or no port.
        """
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{url!r} is no http://host:port")
        return cls(parts.hostname, parts.port, parts.scheme)

    @property
    def url(self) -> str:
        """URL of the proxy, with the scheme of the server."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._flowing.set()
        self.cut()
        if self._pairs:
            await asyncio.wait(list(self._pairs), timeout=DEADLINE)
        await self._server.wait_closed()

    def cut(self, only: bytes = b"") -> None:
        """End open connections; accept new ones.

        Args:
            only: first bytes of the connections to end, such as ``b"GET /v1/jobs/"``. With TLS none match.
        """
        for pair in self._pairs.values():
            if pair.opening.startswith(only):
                pair.abort()

    def refuse(self, only: bytes = b"") -> None:
        """End open connections and refuse new ones until ``accept``, like a dead process.

        Args:
            only: as in ``cut``.
        """
        self._refused = only
        self.cut(only)

    def accept(self) -> None:
        """End ``refuse``."""
        self._refused = None

    def freeze(self) -> None:
        """Hold bytes in both directions until ``thaw``, like a dead machine or a network that drops packets."""
        self._flowing.clear()

    def thaw(self) -> None:
        """End ``freeze``, and deliver the bytes that were held."""
        self._flowing.set()

    def half_open(self) -> None:
        """End the server's side of open connections only; clients keep a connection without a peer."""
        for pair in self._pairs.values():
            if pair.server is not None:
                pair.server.transport.abort()
                pair.server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refused == b"":
            writer.transport.abort()
            return
        self.connections += 1
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("the proxy serves within a task")
        pair = self._pairs[task] = _Pair(writer)
        upstream = None
        try:
            await self._flowing.wait()
            upstream_reader, upstream = await asyncio.open_connection(*self._target)
            pair.server = upstream
            async with asyncio.TaskGroup() as group:
                group.create_task(self._from_client(reader, upstream, pair))
                group.create_task(self._from_server(upstream_reader, pair))
        except OSError:
            writer.transport.abort()
        finally:
            del self._pairs[task]
            for one in (writer, upstream):
                if one is not None:
                    one.transport.abort()

    async def _from_client(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, pair: _Pair) -> None:
        """Until the client ends it, and then it ends for the server too."""
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                if not pair.opening:
                    pair.opening = data
                    if self._refused is not None and data.startswith(self._refused):
                        pair.abort()
                        return
                await self._pass_on(data, upstream, pair)
        upstream.transport.abort()

    async def _from_server(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._pass_on(data, pair.client, pair)
        if pair.server is not None:  # when half open, the end of the server's side is kept from the client
            pair.client.close()

    async def _pass_on(self, data: bytes, writer: asyncio.StreamWriter, pair: _Pair) -> None:
        await self._flowing.wait()
        if pair.server is not None:
            writer.write(data)
            await writer.drain()


class ScriptedSession:
    """The lighthouse's end of one session. The test reads and sends its messages."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[codec.Message | None] = asyncio.Queue()
        """All messages after the hello except heartbeats; None when the connection has ended."""
        self.heartbeats = 0
        self.heard = asyncio.Event()
        """Set with every heartbeat."""
        self.hello: Hello
        self.link = Link(self._on_frame, self._on_lost, limit_bytes=codec.MAX_FRAME_BYTES, unsent_bytes=1 << 28)
        self.greeted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True with the hello; False when the worker disconnected before it."""

    def _on_frame(self, frame: bytes) -> None:
        message = codec.decode(frame)
        if isinstance(message, Hello):
            self.hello = message
            self.greeted.set_result(True)
        elif message.kind == "beat":
            self.heartbeats += 1
            self.heard.set()
        else:
            self.received.put_nowait(message)

    def _on_lost(self, _reason: str) -> None:
        self.received.put_nowait(None)
        if not self.greeted.done():
            self.greeted.set_result(False)

    def send(self, message: codec.Message) -> None:
        self.link.send(codec.encode(message))

    async def next(self, kind: type[M]) -> M:
        """Return the next message, which must be a ``kind``."""
        async with asyncio.timeout(DEADLINE):
            message = await self.received.get()
        if not isinstance(message, kind):
            raise AssertionError(f"expected {kind.__name__}, got {message!r}")  # noqa: TRY004 - the test failed
        return message

    async def ended(self) -> None:
        """Wait until the worker has disconnected; drop its messages."""
        async with asyncio.timeout(DEADLINE):
            while await self.received.get() is not None:
                pass

    def welcome(self, epoch: int = 1, quorum_id: int = 0, *, heartbeat: float = 30.0, timeout: float = 60.0) -> None:
        """Send the welcome. ``heartbeat``, ``timeout``: in seconds, long, so that few heartbeats disturb a test."""
        self.send(
            Welcome(PROTOCOL_VERSION, epoch, quorum_id, round(heartbeat * 1000), round(timeout * 1000), 200, "script")
        )

    def answer(
        self, request: QuorumRequest, *, epoch: int = 1, quorum_id: int = 1, version: int = 1, with_members: bool = True
    ) -> None:
        """Answer with a quorum of the one group that asked."""
        listed: tuple[Member, ...] = ()
        if with_members:
            if request.info is None:
                raise AssertionError("this session has not sent its info yet")
            me = Member(self.hello.replica_id, request.step, request.lineage, 0, shrink_only=False, info=request.info)
            listed = (me,)
        facts = (epoch, quorum_id, 0, version, request.step, request.lineage, 0)
        self.send(Quorum(request.request, *facts, uniform=not with_members, listed=listed))

    async def say_goodbye(self) -> Leave:
        leave = await self.next(Leave)
        self.send(Goodbye())
        return leave


class ScriptedLighthouse:
    """Accepts sessions, and sends only the messages of the test. ``url``: its address."""

    def __init__(self, url: str, sessions: asyncio.Queue[ScriptedSession]) -> None:
        self.url = url
        self._sessions = sessions

    async def session(self, *, welcome_epoch: int | None = 1) -> ScriptedSession:
        """Return the next session whose hello has arrived.

        Args:
            welcome_epoch: send a welcome with this epoch; None: leave the welcome to the test.
        """
        async with asyncio.timeout(DEADLINE):
            while not await (session := await self._sessions.get()).greeted:
                pass
        if welcome_epoch is not None:
            session.welcome(welcome_epoch)
        return session


@asynccontextmanager
async def scripted_lighthouse(
    tokens: Tokens | None = None, tls: TlsFiles | None = None
) -> AsyncIterator[ScriptedLighthouse]:
    """Serve a ``ScriptedLighthouse`` on a free port of loopback while the ``async with`` block runs.

    Args:
        tokens: that sessions need; None: no token.
        tls: certificate of the server; None: no TLS.
    """
    sessions: asyncio.Queue[ScriptedSession] = asyncio.Queue()
    links: set[Link] = set()

    async def accept(request: web.Request) -> web.StreamResponse:
        session = ScriptedSession()
        response = await session.link.accept(request)
        links.add(session.link)
        sessions.put_nowait(session)
        await session.link.closed
        links.discard(session.link)
        return response

    @asynccontextmanager
    async def links_closed() -> AsyncIterator[None]:
        yield
        for link in tuple(links):
            link.abort("the script is over")

    routes = [Route("GET", "/v1/jobs/{job}/session", accept, Access.WORKER)]
    service = Service("scripted lighthouse", routes, lifespan=links_closed)
    async with serving(service, "127.0.0.1", 0, tokens=tokens, tls=tls, stop_seconds=DEADLINE) as endpoint:
        yield ScriptedLighthouse(endpoint.url, sessions)
