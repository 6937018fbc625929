"""A follower's link to the leader: an open connection whose end means that the leader has died.

When a link breaks without a close frame, the follower connects once more, with a short limit: a leader that is alive
accepts that. A leader that sends no frame for ``SILENCE`` seconds counts as dead too. The follower also reports how
many workers asked it for a session, so that a leader learns that workers cannot reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
from aiohttp import web

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import Identity
from keepstep_mesh.net.websocket import Link
from keepstep_mesh.security.request_errors import explained

PATH = "/v1/lighthouses/session"
LINK_CONNECT_SECONDS = 2.0
"""Limit of the first connection to a leader."""
SECOND_TRY_SECONDS = 0.2
"""Limit of the connection after a link broke."""
BEAT_SECONDS = 1.0
"""Interval of pings."""
SILENCE = 5.0
"""Seconds without a frame after which the leader counts as dead."""
MAX_FRAME_BYTES = 1024
UNSENT_BYTES = 64 * 1024

log = get_logger("keepstep.lighthouse")

OnLink = Callable[[bytes], None]
"""Called with the value of the leader's key."""


class LeaderLink:
    """Hold a connection to the current leader, whichever lighthouse that is.

    Args:
        identity: the service token, which the leader requires, and certificates.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._problem = ""
        """Last logged reason why the link is not established."""
        self._target: tuple[str, bytes] | None = None
        """Address of the leader, and the value of its key."""
        self._moved = asyncio.Event()
        self._link: Link | None = None
        self._offered = 0
        """Number of workers that asked this lighthouse for a session."""
        self._dismissed = False
        """Whether the leader itself closed the last link, because it no longer leads."""

    def follow(self, address: str | None, leader: bytes) -> None:
        """Connect to this leader from now on.

        Args:
            address: base URL of the leader; None: connect to no lighthouse.
            leader: value of the leader's key.
        """
        target = None if address is None else (address, leader)
        if target != self._target:
            self._target = target
            self._moved.set()
            if self._link is not None:
                self._link.close(reason="another lighthouse leads")

    def offered(self) -> None:
        """Report to the leader that a worker asked this lighthouse for a session."""
        self._offered += 1
        if self._link is not None:
            self._link.send(b"offered %d" % self._offered)

    async def run(self, linked: OnLink, broke: OnLink) -> None:
        """Hold the link until cancelled.

        Args:
            linked: called when a connection is open.
            broke: called when it ended and the leader did not accept another one.
        """
        while True:
            self._moved.clear()
            target = self._target
            if target is None:
                await self._moved.wait()
                continue
            limit, established = LINK_CONNECT_SECONDS, False
            while await self._connected(target, linked, limit):
                limit, established = SECOND_TRY_SECONDS, True
                if self._target != target or self._dismissed:
                    break
            if established and self._target == target:
                broke(target[1])
            try:
                async with asyncio.timeout(0.5):
                    await self._moved.wait()
            except TimeoutError:
                pass

    async def _connected(self, target: tuple[str, bytes], linked: OnLink, limit: float) -> bool:
        async with self._identity.session(timeout=None) as http:
            return await self._hold(http, target, linked, limit)

    async def _hold(self, http: aiohttp.ClientSession, target: tuple[str, bytes], linked: OnLink, limit: float) -> bool:
        """Open one connection and keep it until it ends. Return whether it was opened."""
        self._dismissed = False
        address, leader = target
        link = Link(lambda _: None, lambda _: None, limit_bytes=MAX_FRAME_BYTES, unsent_bytes=UNSENT_BYTES)
        try:
            async with asyncio.timeout(limit):
                await link.connect(http, f"{address}{PATH}")
        except (aiohttp.ClientError, OSError, KeepstepError, TimeoutError) as error:
            self._report(address, error)
            return False
        self._problem = ""
        if self._target != target:
            link.close()
            return False
        self._link = link
        linked(leader)
        try:
            await self._watch(link)
            self._dismissed = link.closed.done() and link.closed.result().startswith("closed by the peer")
        finally:
            self._link = None
            link.abort("link closed")
        return True

    def _report(self, address: str, error: Exception) -> None:
        """Log a failed attempt: once as a warning if an operator must fix it, else for debugging."""
        reason = explained(error, address)
        misconfigured = isinstance(error, aiohttp.ClientSSLError) or getattr(error, "status", 0) in (401, 403)
        if misconfigured and reason != self._problem:
            self._problem = reason
            log.warning("no link to the leader; a takeover would wait for its lease", leader=address, reason=reason)
        else:
            log.debug("no link to the leader", leader=address, reason=reason)

    async def _watch(self, link: Link) -> None:
        """Ping the leader until the link ends. After a late beat the silence counts from now: this process slept."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while not link.closed.done():
            link.ping()
            before = loop.time()
            await asyncio.wait([link.closed], timeout=BEAT_SECONDS)
            now = loop.time()
            if now - before > 2 * BEAT_SECONDS:
                asked_at = now
            elif now - max(link.last_received, asked_at) > SILENCE:
                link.abort("the leader is silent")
                return


class FollowerLinks:
    """The leader's side of the links of its followers.

    Args:
        offered: called when a follower reports that a worker asked it for a session.
    """

    def __init__(self, offered: Callable[[], None]) -> None:
        self._offered = offered
        self._links: set[Link] = set()

    def __len__(self) -> int:
        return len(self._links)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Accept the link of one follower, and return when it ends."""
        link = Link(lambda _: self._offered(), lambda _: None, limit_bytes=MAX_FRAME_BYTES, unsent_bytes=UNSENT_BYTES)
        response = await link.accept(request)
        self._links.add(link)
        try:
            await link.closed
        finally:
            self._links.discard(link)
            link.abort("the handler ended")
        return response

    def close(self, reason: str) -> None:
        """Close all links, because this lighthouse no longer leads."""
        for link in tuple(self._links):
            link.close(reason=reason)
