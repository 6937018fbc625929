"""A worker's session with a server: connect, say hello, keep alive, fail over, say goodbye.

The sessions of a group with the lighthouse and of a rank with its group server are this one. A ``Dialogue`` has what
differs: the messages, which errors are final, and whether a lost connection is opened again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import aiohttp

from keepstep.session.liveness import Liveness
from keepstep.session.message_channel import CLOSE_SECONDS, MessageChannel
from keepstep.session.open_requests import OpenRequests
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.errors import KeepstepError, ProtocolError, SessionClosed
from keepstep_mesh.net.lighthouse_addresses import Addresses
from keepstep_mesh.protocol import codec
from keepstep_mesh.security.request_errors import explained

WELCOME_SECONDS = 5.0
"""Limit from the hello to the welcome."""


class Dialogue(Protocol):
    """The messages of a session, and the meaning of its events. All methods run on the event loop."""

    def hello(self) -> codec.Message:
        """Return the first message of a new connection."""

    def on_message(self, message: codec.Message) -> None:
        """Act on a message. ``Session.welcome`` notes that the server accepted the session."""

    def on_bad(self, error: Exception) -> None:
        """Called with a ``ProtocolError`` for an invalid message, and with any error of ``on_message``.

        ``Session.refuse`` closes the connection.
        """

    def on_disconnected(self, address: str, reason: str) -> None:
        """Called when a welcomed connection ends before the session does. End the session, or let it reconnect."""

    def final_error(self, error: Exception, problem: str) -> KeepstepError | None:
        """Return the error that ends the session if the first connection fails with ``error``; None: retry.

        ``problem``: address and reason.
        """


class Session:
    """One connection to a server at a time, the open requests, and the end. Call all methods on its event loop.

    Args:
        dialogue: what differs between servers.
        kind: of the server, for logs and errors: ``lighthouse`` or ``group server``.
        log: has the name of this end.
        addresses: base URLs of the servers.
        path: URL path of the session.
        liveness: interval and timeout of heartbeats; judges whether the server is silent.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        kind: str,
        log: Any,
        addresses: Iterable[str],
        path: str,
        liveness: Liveness,
    ) -> None:
        self._dialogue = dialogue
        self._kind = kind
        self._log = log
        self._field = kind.replace(" ", "_")
        self.addresses = Addresses(addresses)
        """Chooses the server of the next connection."""
        self._path = path
        self._welcome_seconds = WELCOME_SECONDS
        self.liveness = liveness
        self.requests = OpenRequests(lambda: self.server is not None)
        self.error: KeepstepError | None = None
        """Why the session has ended for good; None: it has not."""
        self.channel: MessageChannel | None = None
        """The current connection."""
        self.address = ""
        """Address of the current or last connection."""
        self.server: str | None = None
        """The same from the welcome until the end of the connection."""
        self.last_problem = f"no {kind} was tried yet"
        self._farewell: codec.Message | None = None
        self._left: asyncio.Future[None] | None = None
        self._welcomed: asyncio.Future[None]
        self._started: asyncio.Future[None]
        self._runner: asyncio.Task[None] | None = None
        self._unreachable = LogLimiter(seconds=10.0)

    # ---- life

    async def start(
        self,
        open_http: Callable[[], aiohttp.ClientSession],
        timeout: float,
        problem: str,
        welcome_seconds: float | None = None,
    ) -> None:
        """Connect to a server. From then on the session reconnects by itself until it ends.

        Args:
            open_http: opens the HTTP session of one attempt to connect.
            timeout: limit in seconds.
            problem: beginning of the error if no server welcomes this end in time.
            welcome_seconds: limit from the hello to the welcome; None: ``WELCOME_SECONDS``.

        Raises:
            TimeoutError: no server did; with the last reason.
            KeepstepError: the error that ended the session.
        """
        if self.error is not None:
            raise self.error
        self._welcome_seconds = WELCOME_SECONDS if welcome_seconds is None else welcome_seconds
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._runner = loop.create_task(self._run(open_http), name=f"{self._kind} session")
        self._runner.add_done_callback(self._on_runner_done)
        try:
            async with asyncio.timeout(timeout):
                await self._started
        except TimeoutError:
            reason = self.last_problem
            await self.close()
            raise TimeoutError(f"{problem} within {timeout:g} s: {reason}") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the session without a goodbye. May be called repeatedly."""
        self.end(SessionClosed(f"the {self._kind} session was closed"))
        if self._runner is not None and not self._runner.done():
            self._runner.cancel()
            await asyncio.wait([self._runner])

    async def leave(self, farewell: codec.Message, timeout: float) -> None:
        """Send ``farewell``, again after each reconnect, until the session ends. Does nothing if it has ended.

        Raises ``TimeoutError`` after ``timeout`` seconds.
        """
        if self.error is not None:
            return
        self._farewell = farewell
        self._left = asyncio.get_running_loop().create_future()
        self.send(farewell)
        try:
            async with asyncio.timeout(timeout):
                await self._left
        except TimeoutError:
            raise TimeoutError(f"no {self._kind} confirmed the leave within {timeout:g} s: {self.why()}") from None
        finally:
            self._farewell = None

    def end(self, error: KeepstepError) -> None:
        """End the session for good, and fail whatever waits for it."""
        if self.error is None:
            self.error = error
        if self._runner is None:
            return
        self.requests.fail_all(error)
        if not self._started.done():
            self._started.set_exception(error)
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        self.disconnect(str(error))

    def _on_runner_done(self, runner: asyncio.Task[None]) -> None:
        if not runner.cancelled() and (error := runner.exception()) is not None:
            self._log.error(f"{self._kind} session failed", exc_info=error)
            self.end(SessionClosed(f"the {self._kind} session failed: {error!r}"))

    def why(self) -> str:
        """Return why no answer has arrived, as far as this end knows."""
        if self.server:
            return f"the {self._kind} {self.server} did not answer"
        return f"no {self._kind} is reachable ({self.last_problem})"

    # ---- for the dialogue

    def send(self, message: codec.Message) -> None:
        """Send ``message``. It is dropped while disconnected, except a farewell."""
        if self.server is not None and self.channel is not None:
            self.channel.send(message)

    @property
    def is_answered(self) -> bool:
        """Whether the server has welcomed or refused this connection."""
        return self._welcomed.done()

    def welcome(self) -> bool:
        """Note that the server accepted the session. Return whether the session goes on; False: it is leaving."""
        self.server = self.address
        self._unreachable.reset()
        self._welcomed.set_result(None)
        if not self._started.done():
            self._started.set_result(None)
        if self.channel is not None:
            self.channel.watch()
        if self._farewell is not None:
            self.send(self._farewell)
        return self._farewell is None

    def move(self, reason: str) -> None:
        """Close this connection and try another server."""
        if not self._welcomed.done():
            self._welcomed.set_exception(ConnectionRefusedError(reason))
        self.disconnect(reason)

    def refuse(self, error: Exception) -> None:
        """Close this connection because of an invalid message."""
        self._log.error(f"bad message from the {self._kind}", **{self._field: self.address}, reason=str(error))
        self.disconnect(f"bad message: {error}")

    def disconnect(self, reason: str) -> None:
        """Close this connection, if one is open."""
        if self.channel is not None:
            self.channel.link.close(reason=reason)

    # ---- the connection

    async def _run(self, open_http: Callable[[], aiohttp.ClientSession]) -> None:
        """Connect, and reconnect until the session has ended."""
        while self.error is None:
            delay, address = self.addresses.next(random.random())  # noqa: S311
            if delay:
                await asyncio.sleep(delay)
            try:
                async with open_http() as http:
                    await self._connect_once(http, address)
            except (aiohttp.ClientError, OSError, ProtocolError) as error:
                self._attempt_failed(address, error)

    async def _connect_once(self, http: aiohttp.ClientSession, address: str) -> None:
        """Open one connection and keep it until it ends. Raises the reason if it became no session."""
        self._welcomed = asyncio.get_running_loop().create_future()
        channel = MessageChannel(
            self.liveness,
            on_message=self._dialogue.on_message,
            on_bad=self._dialogue.on_bad,
            on_silent=self._on_silent,
            on_lost=self._on_lost,
            limit_bytes=codec.MAX_SERVER_FRAME_BYTES,
        )
        try:
            async with asyncio.timeout(limit := self.addresses.connect_seconds(address)):
                await channel.link.connect(http, f"{address}{self._path}")
        except TimeoutError:
            self.addresses.timed_out(address)
            raise TimeoutError(f"no answer within {limit:g} s") from None
        self.address = address
        self.channel = channel
        try:
            if self.error is None:
                await self._hold(channel, address)
        finally:
            channel.link.close()
            await asyncio.wait([channel.link.closed], timeout=CLOSE_SECONDS)
            channel.link.abort("the peer does not read the last messages")
            self.channel = None

    async def _hold(self, channel: MessageChannel, address: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        channel.send(self._dialogue.hello())
        try:
            async with asyncio.timeout(limit := self._welcome_seconds):
                await self._welcomed
        except TimeoutError:
            raise TimeoutError(f"connected, but no welcome within {limit:g} s") from None
        reason = await channel.link.closed
        self.addresses.lost(address, loop.time() - began, silent=self.liveness.silent)
        if self.error is None:
            self._log.warning(f"{self._kind} session lost", **{self._field: address}, reason=reason)

    def _on_silent(self, seconds: float) -> None:
        if self.channel is not None:
            self.channel.link.abort(f"silent for {seconds:.1f} s")

    def _on_lost(self, reason: str) -> None:
        server, self.server = self.server, None
        self.last_problem = f"{self.address}: {reason}"
        if not self._welcomed.done():
            self._welcomed.set_exception(ConnectionResetError(reason))
        if server is not None and self.error is None:
            self._dialogue.on_disconnected(server, reason)

    def _attempt_failed(self, address: str, error: Exception) -> None:
        reason = explained(error, address)
        self.last_problem = f"{address}: {reason}"
        final = None if self._started.done() else self._dialogue.final_error(error, self.last_problem)
        if final is not None:
            self.end(final)
        elif self.error is None and self._unreachable.allows(asyncio.get_running_loop().time()):
            self._log.warning(f"{self._kind} unreachable; retrying", **{self._field: address}, reason=reason)
