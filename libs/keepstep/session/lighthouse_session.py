"""A worker's session with the lighthouse: connect, fail over, resend requests, send heartbeats, deliver pushes.

The shell of ``session_machine``. A ``Connector`` owns the connection and opens the next one when it ends; an
``OpenRequest`` holds the request that waits for a quorum. The read callback decodes a frame and hands it on. One alarm
sends heartbeats, detects a silent lighthouse, and ends the request at its deadline, so a request needs neither a task
nor a timer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

from keepstep.session import session_events
from keepstep.session.alarm import Alarm
from keepstep.session.connector import Connector
from keepstep.session.liveness import Liveness
from keepstep.session.open_request import OpenRequest
from keepstep.session.session_events import Connected, Disconnected, Push
from keepstep.session.session_machine import SessionCore, StaleLighthouseError
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import base_url
from keepstep_mesh.errors import KeepstepError, ProtocolError, SessionClosed, VersionError
from keepstep_mesh.net.http import Identity
from keepstep_mesh.net.websocket import Link
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import Quorum
from keepstep_mesh.protocol.messages import (
    PROTOCOL_VERSION,
    CancelRequest,
    Closed,
    Denied,
    Drain,
    Evicted,
    Failed,
    Goodbye,
    Healing,
    Heartbeat,
    Leave,
    MemberLost,
    Moved,
    NotLeader,
    QuorumAnswer,
    QuorumRequest,
    Refused,
    RoundBroken,
    ServiceAddress,
    Services,
    Timing,
    ToLighthouse,
    Welcome,
)

log = get_logger("keepstep.session")

ANSWER_MARGIN = 0.25
"""Time after the deadline of a request in which a connected lighthouse may still answer with a reason."""
LIVENESS_POLL_SECONDS = 0.01
"""Interval at which ``probe`` checks for a message."""


class LighthouseSession:
    """The session of one group. Call all methods on the event loop on which it was started.

    Args:
        settings: lighthouses, job, replica_id, token, certificates.
        on_push: called on the event loop with each push; must neither block nor raise.
    """

    def __init__(self, settings: SessionSettings, on_push: Callable[[Push], None]) -> None:
        self._settings = settings
        self._on_push = on_push
        self._core = SessionCore(
            settings.replica_id,
            settings.library,
            heartbeat_interval_ms=round(settings.heartbeat_interval * 1000),
            about=settings.about,
        )
        self._log = log.bind(replica_id=settings.replica_id)
        self.liveness = Liveness(settings.heartbeat_interval, timeout=5.0)
        """Replaced by the values of the lighthouse."""
        self.services: tuple[ServiceAddress, ...] = ()
        """Services that the lighthouse announced last; kept while disconnected. Changes are pushed."""
        self.live_step = 0
        """As in the last ``Welcome``."""
        self.durable_relays: tuple[str, ...] = ()
        """As in the last ``Welcome``."""
        self.version = PROTOCOL_VERSION
        """Version of the protocol that the lighthouse speaks."""
        self.heal_timeout_ms = 0
        """Time that the next quorum waits for a group that heals; 0: unknown."""

        addresses = [base_url(one) for one in settings.addresses]
        self._connector = Connector(addresses, f"{self.job_path}/session", self, self.liveness, settings.replica_id)
        self._request = OpenRequest(self._core, self._send)
        self._farewell: Leave | None = None
        self._left: asyncio.Future[None] | None = None
        self._ended: KeepstepError | None = None
        self._alarm = Alarm(self._tick)
        self.identity: Identity
        """Token and certificate; set by ``start``."""
        self._loop: asyncio.AbstractEventLoop
        self._started: asyncio.Future[None]
        self._runner: asyncio.Task[None] | None = None

    @property
    def lighthouse(self) -> str | None:
        """Address of the current lighthouse; None while disconnected."""
        return self._connector.lighthouse

    @property
    def job_path(self) -> str:
        """URL path of the job."""
        return f"/v1/jobs/{quote(self._settings.job, safe='')}"

    @property
    def epoch(self) -> int:
        """Highest epoch seen; 0 before the first welcome."""
        return self._core.epoch

    @property
    def stands_by(self) -> bool:
        """Whether the group has been in no quorum, and may wait as a spare."""
        return self._core.stands_by

    @property
    def quorum_id(self) -> int:
        """Highest quorum_id seen."""
        return self._core.quorum_id

    # ---- life

    async def start(self) -> None:
        """Connect to a lighthouse. From then on the session reconnects by itself until ``close``.

        Raises:
            TimeoutError: no lighthouse welcomed the group within ``connect_timeout``; with the last reason.
            AuthError: the token was refused.
            ProtocolError: the name of the job is invalid.
            TlsError: a certificate or key is invalid.
            VersionError: the worker or the lighthouse is too old.
            Banned: the group is banned.
        """
        if self._ended is not None:
            raise self._ended
        self.identity = Identity(self._settings.token, self._settings.tls)
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._runner = self._loop.create_task(
            self._connector.run(self.identity), name=f"lighthouse session of {self._settings.replica_id}"
        )
        self._runner.add_done_callback(self._runner_done)
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                await self._started
        except TimeoutError:
            problem = self._connector.last_problem
            await self.close()
            limit = self._settings.connect_timeout
            raise TimeoutError(
                f"no lighthouse welcomed {self._settings.replica_id} within {limit:g} s: {problem}"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the session without a graceful leave. Call ``leave`` before it. May be called repeatedly."""
        self._end(SessionClosed("the lighthouse session was closed"))
        if self._runner is not None and not self._runner.done():
            self._runner.cancel()
            await asyncio.wait([self._runner])

    async def leave(self, reason: str, timeout: float, *, cause: str = "", step: int | None = None) -> None:
        """Leave gracefully: send ``Leave``, again after each reconnect, until the lighthouse confirms it.

        Does nothing if the session has ended. Raises ``TimeoutError`` after ``timeout`` seconds without a confirmation.
        ``cause`` and ``step``: as in ``Leave``.
        """
        if self._ended is not None:
            return
        self._farewell = Leave(reason, cause, step)
        self._left = self._loop.create_future()
        self._send(self._farewell)
        try:
            async with asyncio.timeout(timeout):
                await self._left
        except TimeoutError:
            raise TimeoutError(f"no lighthouse confirmed the leave within {timeout:g} s: {self.why()}") from None
        finally:
            self._farewell = None

    async def failed(self, reason: str, timeout: float) -> None:
        """Report that the whole group is lost, and end the session. Never raises: the process is about to exit."""
        link = self._connector.link
        if not self.lighthouse:
            self._log.warning("could not report that the group failed", reason=self.why())
        self._send(Failed(reason))
        self._end(SessionClosed(f"the group failed: {reason}"))
        if link is not None:
            await asyncio.wait([link.closed], timeout=timeout)

    async def probe(self, timeout: float) -> None:
        """Wait for a message of a lighthouse. Raises ``TimeoutError`` with the reason after ``timeout`` seconds."""
        began, asked = self._loop.time(), None
        try:
            async with asyncio.timeout(timeout):
                while self._ended is None:
                    if self.lighthouse and self._connector.link is not None:
                        if self._connector.link is not asked:
                            asked = self._connector.link
                            asked.ping()
                        elif asked.last_received >= began:
                            return
                    await asyncio.sleep(LIVENESS_POLL_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s: {self.why()}") from None
        raise self._ended

    # ---- the step

    async def quorum(self, request: QuorumRequest) -> Quorum:
        """Request the quorum of the next step and wait for it: ``await request_quorum(request)``."""
        answer = self.request_quorum(request)
        try:
            return await answer
        except asyncio.CancelledError:
            self.give_up_answer()  # it may have arrived before the cancellation
            raise

    def request_quorum(self, request: QuorumRequest) -> asyncio.Future[Quorum]:
        """Request the quorum of the next step. The request is sent again after each reconnect.

        Only one request may be open. Cancelling the future withdraws the request. The future raises ``TimeoutError``
        with the reason after ``timeout_ms``, ``LayoutMismatch`` if parameters or settings differ from those of the job,
        and ``SessionClosed`` if the session ends.

        Args:
            request: with its info and settings, which are sent only when they have changed; the session numbers it.
        """
        if self._ended is not None:
            raise self._ended
        now = self._loop.time()
        deadline = now + request.timeout_ms / 1000
        future = self._request.open(request, deadline)
        if self.lighthouse:
            self._request.send(now)
        self._alarm.set_by(deadline)
        return future

    def finished_step(self) -> None:
        """Forget the last answer, because its step was committed or has failed. May be called from any thread."""
        self._core.finished_step()

    def give_up_answer(self) -> None:
        """Let the lighthouse end the quorum of the last answer, unless its step is over: this group takes no part."""
        if self._core.held is not None:
            self._core.finished_step()
            self._send(CancelRequest(self._core.number))

    def healing(self, progress: Healing) -> None:
        """Report the progress of a heal. Dropped while disconnected; the next report replaces it."""
        self._send(progress)

    # ---- the connection

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended for good."""
        return self._ended is not None

    def hello(self) -> codec.Message:
        """See ``ConnectionOwner``."""
        return self._core.hello()

    def on_disconnected(self, lighthouse: str, reason: str) -> None:
        """See ``ConnectionOwner``."""
        self._on_push(Disconnected(lighthouse, reason))

    def on_failed_attempt(self, error: Exception, problem: str) -> None:
        """End the session if the first connection failed with an error that a retry does not fix."""
        final = None if self._started.done() else session_events.of_connecting(error, problem)
        if final is not None:
            self._end(final)

    def _end(self, error: KeepstepError) -> None:
        """End the session for good, and fail whatever waits for it."""
        if self._ended is None:
            self._ended = error
        self._alarm.set(None)
        if self._runner is None:
            return
        self._request.fail(error)
        if not self._started.done():
            self._started.set_exception(error)
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        self._connector.close(str(error))

    def _runner_done(self, runner: asyncio.Task[None]) -> None:
        if not runner.cancelled() and (error := runner.exception()) is not None:
            self._log.error("lighthouse session failed", exc_info=error)
            self._end(SessionClosed(f"the lighthouse session failed: {error!r}"))

    # ---- out

    def _send(self, message: ToLighthouse) -> None:
        """Send a message. While disconnected it is dropped; ``_on_welcome`` repeats requests and leaves."""
        if self.lighthouse and self._connector.link is not None:
            self.liveness.sent(self._loop.time())
            self._connector.link.send(codec.encode(message))

    def _tick(self) -> None:
        """Check the deadline of the request, the heartbeat and the lighthouse; then set the next tick."""
        now = self._loop.time()
        stalled = self._alarm.due is not None and self.liveness.is_late(now, self._alarm.due)
        due = []
        deadline = self._request.deadline
        if deadline is not None:
            deadline += ANSWER_MARGIN if self.lighthouse else 0.0
            if now >= deadline:
                self._request.fail(TimeoutError(f"no quorum in time: {self.why()}"))
            else:
                due.append(deadline)
        if self.lighthouse and self._connector.link is not None:
            if now >= self.liveness.beat_due:
                self._send(Heartbeat())
            due.append(self.liveness.beat_due)
            self._watch(self._connector.link, now, stalled=stalled)
        self._alarm.set(min(due, default=None))

    def _watch(self, link: Link, now: float, *, stalled: bool) -> None:
        match self.liveness.judge(now, link.last_received, stalled=stalled):
            case "ask":
                link.ping()
            case "silent":
                link.abort(f"silent for {now - link.last_received:.1f} s")

    def why(self) -> str:
        """Return why no answer has arrived, as far as the worker knows."""
        if self.lighthouse:
            return f"the lighthouse {self.lighthouse} did not answer"
        return f"no lighthouse is reachable ({self._connector.last_problem})"

    # ---- in

    def on_frame(self, frame: bytes) -> None:
        try:
            message = codec.decode(frame, codec.MAX_SERVER_FRAME_BYTES)
            self._on_message(message)
        except StaleLighthouseError as error:
            self._move(str(error))
        except VersionError as error:
            self._end(error)
        except ProtocolError as error:
            self._log.error("bad message from the lighthouse", lighthouse=self._connector.address, reason=str(error))
            self._connector.close(f"bad message: {error}")

    def _on_message(self, message: codec.Message) -> None:
        match message:
            case QuorumAnswer():
                if self.lighthouse is None:
                    raise ProtocolError("answer before the welcome")
                self._request.answered(message)
            case MemberLost() | RoundBroken() | Drain():
                self._on_push(message)
            case Welcome():
                self._on_welcome(message)
            case Timing():
                self._set_timing(message)
                if self._ended is None:
                    self._tick()
            case Services(services):
                self._set_services(services)
            case Closed():
                self._request.closed(message)
            case Denied():
                self._request.denied(message)
            case Goodbye():
                self._end(SessionClosed("the group left the job"))
            case NotLeader(leader=leader):
                self._connector.follow(leader)
                self._move(f"it is not the leader; {leader or 'no lighthouse'} is")
            case Evicted(reason=reason):
                self._on_push(message)
                self._end(SessionClosed(f"evicted: {reason}"))
            case Refused(reason=reason):
                if (final := session_events.of_session(message)) is not None:
                    self._end(final)
                else:
                    self._move(reason)
            case _:
                raise ProtocolError(f"unexpected message {message.kind!r} from a lighthouse")

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._connector.is_welcomed:
            raise ProtocolError("second welcome in one session")
        self._core.welcomed(welcome)
        self._set_timing(welcome)
        self.live_step, self.version = welcome.live_step, welcome.version
        self.durable_relays = welcome.durable_relays
        now = self._loop.time()
        self.liveness.begins(now)
        self._connector.welcome()
        if self._farewell is not None:
            self._send(self._farewell)
        else:
            self._request.send(now)
        self._tick()
        self._log.info("session with a lighthouse opened", lighthouse=self._connector.address, epoch=self.epoch)
        self._on_push(Connected(self._connector.address, self.epoch))
        self._set_services(welcome.services)
        if not self._started.done():
            self._started.set_result(None)

    def _set_timing(self, message: Welcome | Timing) -> None:
        self.liveness.interval = message.heartbeat_interval_ms / 1000 or self._settings.heartbeat_interval
        self.liveness.timeout = message.heartbeat_timeout_ms / 1000 or self.liveness.timeout
        self.heal_timeout_ms = message.heal_timeout_ms

    def _set_services(self, services: tuple[ServiceAddress, ...]) -> None:
        if services != self.services:
            self.services = services
            self._on_push(Services(services))

    def _move(self, reason: str) -> None:
        """Move to another lighthouse."""
        self._send(Moved())
        self._connector.move(reason)
