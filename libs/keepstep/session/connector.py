"""Connect a session to one lighthouse after another: addresses, redirects, retries, and the limit of each attempt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Protocol

import aiohttp

from keepstep.session.liveness import Liveness
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import base_url
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.net.http import Identity
from keepstep_mesh.net.lighthouse_addresses import Addresses
from keepstep_mesh.net.websocket import Link
from keepstep_mesh.protocol import codec
from keepstep_mesh.security.tls import as_safe, explained

log = get_logger("keepstep.session")

WELCOME_SECONDS = 5.0
"""Limit from ``Hello`` to ``Welcome``."""
UNREACHABLE_LOG_SECONDS = 10.0
UNSENT_BYTES = 4 * codec.MAX_FRAME_BYTES


class ConnectionOwner(Protocol):
    """The session that a connector serves."""

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended for good."""

    def hello(self) -> codec.Message:
        """Return the first message of a new connection."""

    def on_frame(self, frame: bytes) -> None: ...

    def on_disconnected(self, lighthouse: str, reason: str) -> None:
        """Called when the connection of a session ends, if the session itself goes on."""

    def on_failed_attempt(self, error: Exception, problem: str) -> None:
        """Called after an attempt without a session; may end the session. ``problem``: address and reason."""


class Connector:
    """Keeps one connection to a lighthouse, and opens the next one when it ends.

    Args:
        addresses: base URLs of all lighthouses.
        path: URL path of the session.
        owner: receives frames and events.
        liveness: judges whether the lighthouse is silent.
        replica_id: for logs.
    """

    def __init__(
        self, addresses: Iterable[str], path: str, owner: ConnectionOwner, liveness: Liveness, replica_id: str
    ) -> None:
        self._addresses = Addresses(addresses)
        self._path = path
        self._owner = owner
        self._liveness = liveness
        self._log = log.bind(replica_id=replica_id)
        self._unreachable = LogLimiter(UNREACHABLE_LOG_SECONDS)
        self._welcomed: asyncio.Future[None]
        self.link: Link | None = None
        self.address = ""
        """Address of the current or last connection."""
        self.lighthouse: str | None = None
        """The same from the welcome until the end of the connection."""
        self.last_problem = "no lighthouse was tried yet"

    async def run(self, identity: Identity) -> None:
        """Connect, and reconnect until the session has ended."""
        while not self._owner.has_ended:
            delay, address = self._addresses.next(random.random())  # noqa: S311
            if delay:
                await asyncio.sleep(delay)
            try:
                async with identity.session(timeout=None, kind="lighthouse") as http:
                    await self._connect_once(http, address)
            except (aiohttp.ClientError, OSError, ProtocolError) as error:
                self._attempt_failed(address, error)

    @property
    def is_welcomed(self) -> bool:
        """Whether the lighthouse has welcomed or refused this connection."""
        return self._welcomed.done()

    def welcome(self) -> None:
        """Note that the lighthouse accepted the session on this connection."""
        self.lighthouse = self.address
        self._unreachable.reset()
        self._welcomed.set_result(None)

    def follow(self, leader: str) -> None:
        """Try ``leader`` next, if its address is safe to send the token to."""
        self._addresses.follow(as_safe(base_url(leader), self.address) if leader else "")

    def move(self, reason: str) -> None:
        """Close this connection and try another lighthouse."""
        if not self._welcomed.done():
            self._welcomed.set_exception(ConnectionRefusedError(reason))
        self.close(reason)

    def close(self, reason: str) -> None:
        """Close this connection, if one is open."""
        if self.link is not None:
            self.link.close(reason=reason)

    async def _connect_once(self, http: aiohttp.ClientSession, address: str) -> None:
        """Open one connection and keep it until it ends. Raises the reason if it became no session."""
        self._welcomed = asyncio.get_running_loop().create_future()
        link = Link(
            self._owner.on_frame, self._on_lost, limit_bytes=codec.MAX_SERVER_FRAME_BYTES, unsent_bytes=UNSENT_BYTES
        )
        try:
            async with asyncio.timeout(limit := self._addresses.connect_seconds(address)):
                await link.connect(http, f"{address}{self._path}")
        except TimeoutError:
            self._addresses.timed_out(address)
            raise TimeoutError(f"no answer within {limit:g} s") from None
        self.address = address
        self.link = link
        try:
            if not self._owner.has_ended:
                await self._hold(link, address)
        finally:
            link.close()
            await asyncio.wait([link.closed], timeout=1)
            link.abort("the peer does not read the last messages")
            self.link = None

    async def _hold(self, link: Link, address: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        link.send(codec.encode(self._owner.hello()))
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                await self._welcomed
        except TimeoutError:
            raise TimeoutError(f"connected, but no welcome within {WELCOME_SECONDS:g} s") from None
        reason = await link.closed
        self._addresses.lost(address, loop.time() - began, silent=self._liveness.silent)
        if not self._owner.has_ended:
            self._log.warning("lighthouse session lost", lighthouse=address, reason=reason)

    def _on_lost(self, reason: str) -> None:
        lighthouse, self.lighthouse = self.lighthouse, None
        self.last_problem = f"{self.address}: {reason}"
        if not self._welcomed.done():
            self._welcomed.set_exception(ConnectionResetError(reason))
        if lighthouse is not None and not self._owner.has_ended:
            self._owner.on_disconnected(lighthouse, reason)

    def _attempt_failed(self, address: str, error: Exception) -> None:
        reason = explained(error, address)
        self.last_problem = f"{address}: {reason}"
        self._owner.on_failed_attempt(error, self.last_problem)
        if not self._owner.has_ended and self._unreachable.allows(asyncio.get_running_loop().time()):
            self._log.warning("lighthouse unreachable; retrying", lighthouse=address, reason=reason)
