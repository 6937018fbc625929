"""Connections of processes: ``Wire`` replaces ``websocket.Link`` under the real sessions and leader links.

A ``Socket`` is the kernel's end of a ``Connection``: it buffers messages until the process reads them, also while the
process is paused. When the process dies, the kernel ends the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keepstep_mesh.net.websocket import CLOSE_NORMAL
from keepstep_mesh.protocol import codec
from tests.simulation.virtual.network import FIN, Connection

if TYPE_CHECKING:
    from tests.simulation.actors.node import Node


@dataclass(frozen=True, slots=True)
class CloseFrame:
    """The last message of an orderly close."""

    reason: str


PING, PONG = object(), object()


class Socket:
    """``remote``: name of the group that connected; empty: unknown."""

    def __init__(self, node: Node, remote: str = "") -> None:
        self.node = node
        self.remote = remote
        self.transport = None
        """The simulated machines have names, and no addresses of their own."""
        self.connection: Connection
        self._waiting: deque[Any] = deque()
        self._reader: Callable[[Any], None] | None = None
        self._ended = False
        node.sockets[self] = None

    def receive(self, _: Connection, message: Any) -> None:
        """Take a message from the network."""
        if not self.node.loop.dead:
            self.node.loop.deliver(self._on_message, message)

    def _on_message(self, message: Any) -> None:
        if self._reader is None:
            self._waiting.append(message)
        else:
            self._reader(message)

    def read(self, reader: Callable[[Any], None]) -> None:
        """Pass all buffered and all later messages to ``reader``."""
        self._reader = reader
        while self._waiting:
            reader(self._waiting.popleft())

    def send(self, message: Any) -> None:
        if not self._ended and not self.node.loop.dead:
            self.connection.send(self, message)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            del self.node.sockets[self]
            if not self.node.loop.dead:
                self.connection.close(self)


class Wire:
    """The interface of ``websocket.Link`` that sessions and leader links use."""

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[str], None],
        *,
        limit_bytes: int,  # noqa: ARG002 - the signature of Link
        unsent_bytes: int,  # noqa: ARG002
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[str] = self.loop.create_future()
        self.last_received = self.loop.time()
        self._on_frame, self._on_lost = on_frame, on_lost
        self._ordinal = hash(self.closed)
        self._socket: Socket
        self._closing = False
        self._reason = ""

    def __hash__(self) -> int:
        return self._ordinal

    async def connect(self, node: Node, url: str) -> None:
        """Connect the process ``node`` to ``url``. Raises ``OSError`` or ``UpgradeError``, or hangs."""
        self._take(await node.dial(url))

    async def accept(self, socket: Socket) -> None:
        self._take(socket)

    def _take(self, socket: Socket) -> None:
        self._socket = socket
        self.last_received = self.loop.time()
        self.loop.call_soon(socket.read, self._receive)

    def send(self, message: bytes) -> None:
        if not self._closing:
            self._socket.send(message)

    def ping(self) -> None:
        if not self._closing:
            self._socket.send(PING)

    def close(self, code: int = CLOSE_NORMAL, reason: str = "closed here") -> None:  # noqa: ARG002
        if not self._closing:
            self._socket.send(CloseFrame(reason))
            self.abort(reason)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        if not self._closing:
            self._closing = True
            self._socket.end()
            self.loop.call_soon(self._lost)

    def _lost(self) -> None:
        if not self.closed.done():
            self.closed.set_result(self._reason or "the connection ended")
            self._on_lost(self.closed.result())

    def _receive(self, message: Any) -> None:
        self.last_received = self.loop.time()
        if self._closing:
            return
        if message is FIN:
            self.abort("the connection ended")
        elif isinstance(message, CloseFrame):
            self.abort(f"closed by the peer: {message.reason}")
        elif message is PING:
            self._socket.send(PONG)
        elif message is not PONG:
            self._on_frame(message if isinstance(message, bytes) else codec.encode(message))


class IdentityOf:
    """Replaces the ``Identity`` of a process. Its HTTP session is the process itself, which ``Wire`` dials from."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @asynccontextmanager
    async def session(self, **_: object) -> AsyncIterator[Node]:
        yield self._node
