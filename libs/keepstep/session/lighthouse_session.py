"""A group's session with the lighthouse: quorum requests, heals, pushes.

The ``Dialogue`` of a ``Session``, which owns the connection, and the shell of ``session_machine``. The read callback
decodes a frame and hands it on, so an answer needs no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

from keepstep.session import session_events
from keepstep.session.liveness import Liveness
from keepstep.session.session import Session
from keepstep.session.session_events import Connected, Disconnected, Push
from keepstep.session.session_machine import SessionCore, StaleLighthouseError
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import base_url
from keepstep_mesh.errors import KeepstepError, ProtocolError, SessionClosed, VersionError
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import (
    CancelRequest,
    Closed,
    Denied,
    Drain,
    Evicted,
    Failed,
    Goodbye,
    Healing,
    Leave,
    MemberLost,
    Moved,
    NotLeader,
    Quorum,
    QuorumRequest,
    Refused,
    RoundBroken,
    ServiceAddress,
    Services,
    ShardReport,
    Timing,
    Welcome,
)
from keepstep_mesh.protocol.stack_messages import Hung, RankStacks, StacksRequest
from keepstep_mesh.security.tls import as_safe

log = get_logger("keepstep.session")


class LighthouseSession:
    """The session of one group. Call all methods on the event loop on which it was started.

    Args:
        settings: lighthouses, job, replica_id, token, certificates.
        on_push: called on the event loop with each push; must neither block nor raise.
        on_timing: called when the lighthouse has set the heartbeat timeout of the job; ``liveness`` has it.
    """

    def __init__(
        self, settings: SessionSettings, on_push: Callable[[Push], None], on_timing: Callable[[], None] = lambda: None
    ) -> None:
        self._settings = settings
        self._on_push = on_push
        self._on_timing = on_timing
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
        self.heal_timeout_ms = 0
        """Time that the next quorum waits for a group that heals; 0: unknown."""
        self.identity: Identity
        """Token and certificate; set by ``start``."""
        addresses = [base_url(one) for one in settings.addresses]
        self._session = Session(self, "lighthouse", self._log, addresses, f"{self.job_path}/session", self.liveness)

    @property
    def lighthouse(self) -> str | None:
        """Address of the current lighthouse; None while disconnected."""
        return self._session.server

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
        self.identity = Identity(self._settings.token, self._settings.tls)
        await self._session.start(
            lambda: self.identity.session(timeout=None, kind="lighthouse"),
            self._settings.connect_timeout,
            f"no lighthouse welcomed {self._settings.replica_id}",
        )

    async def close(self) -> None:
        """Close the session without a graceful leave. Call ``leave`` before it. May be called repeatedly."""
        await self._session.close()

    async def leave(self, reason: str, timeout: float, *, cause: str = "", step: int | None = None) -> None:
        """Leave gracefully: send ``Leave``, again after each reconnect, until the lighthouse confirms it.

        Does nothing if the session has ended. Raises ``TimeoutError`` after ``timeout`` seconds without a confirmation.
        ``cause`` and ``step``: as in ``Leave``.
        """
        await self._session.leave(Leave(reason, cause, step), timeout)

    async def failed(self, reason: str, timeout: float) -> None:
        """Report that the whole group is lost, and end the session. Never raises: the process is about to exit."""
        channel = self._session.channel
        if not self.lighthouse:
            self._log.warning("could not report that the group failed", reason=self.why())
        self._session.send(Failed(reason))
        self._session.end(SessionClosed(f"the group failed: {reason}"))
        if channel is not None:
            await asyncio.wait([channel.link.closed], timeout=timeout)

    async def probe(self, timeout: float) -> None:
        """Wait for a message of a lighthouse. Raises ``TimeoutError`` with the reason after ``timeout`` seconds."""
        began, asked = asyncio.get_running_loop().time(), None
        try:
            async with asyncio.timeout(timeout):
                while self._session.error is None:
                    if self.lighthouse and self._session.channel is not None:
                        link = self._session.channel.link
                        if link is not asked:
                            asked = link
                            asked.ping()
                        elif asked.last_received >= began:
                            return
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s: {self.why()}") from None
        raise self._session.error

    def why(self) -> str:
        """Return why no answer has arrived, as far as the worker knows."""
        return self._session.why()

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
        session = self._session
        if session.error is not None:
            raise session.error
        if self._core.open is not None and session.requests.any_open():
            raise KeepstepError("a quorum request is already open; wait for it or cancel it")
        number = self._core.ask(request)
        now = asyncio.get_running_loop().time()
        answer = session.requests.open(number, now + request.timeout_ms / 1000, self._late, self._withdraw)
        if session.server is not None:
            self._send_request(request.timeout_ms)
        return answer

    def finished_step(self) -> None:
        """Forget the last answer, because its step was committed or has failed. May be called from any thread."""
        self._core.finished_step()

    def give_up_answer(self) -> None:
        """Let the lighthouse end the quorum of the last answer, unless its step is over: this group takes no part."""
        if self._core.held is not None:
            self._core.finished_step()
            self._session.send(CancelRequest(self._core.number))

    def healing(self, progress: Healing) -> None:
        """Report the progress of a heal. Dropped while disconnected; the next report replaces it."""
        self._session.send(progress)

    def shards(self, report: ShardReport) -> None:
        """Report the shards of the group. Each lighthouse gets the last report when it welcomes the group."""
        self._core.shards = report
        if self._session.server is not None:
            self._send_shards()

    def stacks(self, found: RankStacks) -> None:
        """Send the stacks of a rank. Dropped while disconnected."""
        if self._session.server is not None:
            self._session.send(found)

    def _send_shards(self) -> None:
        if (report := self._core.shards_to_send()) is not None:
            self._session.send(report)

    def _send_request(self, timeout_ms: int) -> None:
        """Send the open request, if any, on a connection that does not have it."""
        request = self._core.to_send(max(1, timeout_ms))
        if request is not None:
            self._session.send(request)

    def _withdraw(self, number: int) -> None:
        self._core.finished_step()
        if self._core.withdraw(number):
            self._session.send(CancelRequest(number))

    def _late(self) -> str:
        return f"no quorum in time: {self.why()}"

    # ---- the dialogue

    def hello(self) -> codec.Message:
        """See ``Dialogue``."""
        return self._core.hello()

    def on_disconnected(self, address: str, reason: str) -> None:
        """See ``Dialogue``."""
        self._on_push(Disconnected(address, reason))

    def final_error(self, error: Exception, problem: str) -> KeepstepError | None:
        """See ``Dialogue``."""
        return session_events.of_connecting(error, problem)

    def on_bad(self, error: Exception) -> None:
        """See ``Dialogue``."""
        if not isinstance(error, ProtocolError):
            raise error
        if isinstance(error, StaleLighthouseError):
            self._move(str(error))
        elif isinstance(error, VersionError):
            self._session.end(error)
        else:
            self._session.refuse(error)

    def on_message(self, message: codec.Message) -> None:
        """See ``Dialogue``."""
        match message:
            case Quorum():
                if self._session.server is None:
                    raise ProtocolError("answer before the welcome")
                quorum = self._core.answered(message)
                if quorum is not None:
                    self._session.requests.answer(message.request, quorum)
            case MemberLost() | RoundBroken() | Drain() | StacksRequest():
                self._on_push(message)
            case Welcome():
                self._on_welcome(message)
            case Timing():
                self._set_timing(message)
                if self.lighthouse and self._session.channel is not None:
                    self._session.channel.tick()
            case Services(services):
                self._set_services(services)
            case Closed(request=request):
                if self._core.withdraw(request):
                    self._session.requests.fail(request, session_events.of_closed(message))
            case Denied(request=request):
                if self._core.withdraw(request):
                    self._session.requests.fail(request, session_events.of_request(message))
            case Goodbye():
                self._session.end(SessionClosed("the group left the job"))
            case NotLeader(leader=leader):
                self._session.addresses.follow(as_safe(base_url(leader), self._session.address) if leader else "")
                self._move(f"it is not the leader; {leader or 'no lighthouse'} is")
            case Evicted(reason=reason):
                self._on_push(message)
                self._session.end(SessionClosed(f"evicted: {reason}"))
            case Hung(reason=reason):
                self._on_push(message)
                self._session.end(SessionClosed(f"the group hangs: {reason}"))
            case Refused(reason=reason):
                if (final := session_events.of_session(message)) is not None:
                    self._session.end(final)
                else:
                    self._move(reason)
            case _:
                raise ProtocolError(f"unexpected message {message.kind!r} from a lighthouse")

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._session.is_answered:
            raise ProtocolError("second welcome in one session")
        self._core.welcomed(welcome)
        self._set_timing(welcome)
        self.live_step = welcome.live_step
        self.durable_relays = welcome.durable_relays
        if self._session.welcome():
            self._send_shards()
            deadline = self._session.requests.deadline(self._core.number)
            left = 0.0 if deadline is None else deadline - asyncio.get_running_loop().time()
            self._send_request(round(left * 1000))
        self._log.info("session with a lighthouse opened", lighthouse=self._session.address, epoch=self.epoch)
        self._on_push(Connected(self._session.address, self.epoch))
        self._set_services(welcome.services)

    def _set_timing(self, message: Welcome | Timing) -> None:
        self.liveness.interval = message.heartbeat_interval_ms / 1000 or self._settings.heartbeat_interval
        self.liveness.timeout = message.heartbeat_timeout_ms / 1000 or self.liveness.timeout
        self.heal_timeout_ms = message.heal_timeout_ms
        self._on_timing()

    def _set_services(self, services: tuple[ServiceAddress, ...]) -> None:
        if services != self.services:
            self.services = services
            self._on_push(Services(services))

    def _move(self, reason: str) -> None:
        """Move to another lighthouse."""
        self._session.send(Moved())
        self._session.move(reason)
