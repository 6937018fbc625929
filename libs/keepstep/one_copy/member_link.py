"""The place of one rank in its job: its group, the lighthouse, and what they push."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch.distributed import Store

from keepstep.group.group_link import LinkSettings, connect_group
from keepstep.group.group_server import LEAVE_SECONDS
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.rank_link import Leaving, RankLink
from keepstep.runtime.exits import (
    EvictedExit,
    JobClosedExit,
    MismatchExit,
    PreflightExit,
    TerminationFlag,
    end_process,
    leave_cause,
)
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.script_checks.common_values import arithmetic
from keepstep.session.session_events import Push
from keepstep.step.evidence.failure_evidence import FailureEvidence, Progress
from keepstep.step.reporting.step_telemetry import REPORT_WAIT_SECONDS
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import (
    Banned,
    Drained,
    ExitWithReason,
    JobClosed,
    KeepstepError,
    LayoutMismatch,
    MachineDiffers,
    SessionClosed,
)
from keepstep_mesh.exit_codes import EXIT_GROUP_FAILED
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.membership import with_settings
from keepstep_mesh.protocol.messages import Drain, Evicted, MemberLost, RoundBroken, ShardReport
from keepstep_mesh.security.tokens import ClientToken

log = get_logger("keepstep.one_copy")

FAILURE_REPORT_SECONDS = 1.0
"""Limit of the report that this process ends."""
REMEMBERED = 64
"""Number of quorums whose loss is kept: it may arrive before the answer of its quorum is handled."""


class MemberLink:
    """Asks for quorums, and hears of losses.

    Args:
        settings: of the link.
        common: settings that all members must share, as text.
        device_type: of the model. The arithmetic of this process is read at the first request, since a script may set
            the number of threads after it has made this object.
        timeout: of a collective, in seconds.
        progress: tells when the last collective began.

    Raises:
        TimeoutError, KeepstepError, EvictedExit: as ``Manager``.
    """

    def __init__(
        self, settings: LinkSettings, common: str, device_type: str, timeout: float, progress: Progress
    ) -> None:
        self.settings = settings
        self.evidence = FailureEvidence(timeout, self._on_cut_off)
        """Why steps have failed, for the next request."""
        self._progress = progress
        self.token = ClientToken.of(settings.token)
        self.on_lost: Callable[[int, str], None] = lambda *_: None
        """Called with a quorum_id and the reason, from another thread, when that quorum has lost a member, or
        cannot go on because this member does not reach another one."""
        self._leaving = ""
        self._may_leave = True
        """Whether an order to leave is carried out while a request is open."""
        self._waits_to_leave = False
        self._fatal: ExitWithReason | None = None
        self._requests = 0
        self._ended = False
        self._lost: dict[int, str] = {}
        self._members_lost: dict[int, set[str]] = {}
        self._cut_off_in = -1
        """The last quorum in which this member did not reach another one."""
        self.loop_thread = LoopThread()
        with contextlib.ExitStack() as closing:
            closing.callback(self.loop_thread.stop)
            try:
                self.link, self._store = self._connect()
            except Banned as error:
                raise EvictedExit(str(error)) from error
            closing.pop_all()
        self._common, self._device_type = common, device_type
        self._termination = TerminationFlag(self.request_leave)
        self._watch = self.loop_thread.spawn(self.evidence.watch())

    def _connect(self) -> tuple[RankLink, Store | None]:
        return connect_group(self.loop_thread, self.settings, self._on_group_failed, self._on_push)

    @property
    def replica_id(self) -> str:
        """Of this member."""
        return self.link.replica_id

    @property
    def store(self) -> Store | None:
        """Of the ranks of this member; None: it has one rank."""
        return self._store

    @property
    def fatal(self) -> ExitWithReason | None:
        """The exit that the lighthouse has ordered, or of ``ends_with``; None: none."""
        return self._fatal

    def ends_with(self, error: ExitWithReason) -> ExitWithReason:
        """Let all ranks of this member end with the exit code of ``error``, whichever ends first. Return it."""
        self._fatal = error
        return error

    def loss_of(self, quorum_id: int) -> str:
        """Return why a quorum has ended; empty: it has not."""
        return self._lost.get(quorum_id, "")

    def lost_members(self, quorum_id: int) -> AbstractSet[str]:
        """Return the replica_ids of the members that a quorum has lost; empty: it has not ended, or by an error."""
        return self._members_lost.get(quorum_id, set())

    def is_explained(self, quorum_id: int) -> bool:
        """Return whether a lost member, or one that cannot be reached, has ended a quorum."""
        return quorum_id in self._members_lost or quorum_id == self._cut_off_in

    @property
    def leaving(self) -> bool:
        """Whether this member is to leave."""
        return bool(self._leaving)

    # ---- pushes, on the event-loop thread

    def _on_group_failed(self, reason: str) -> None:
        if not self._ended and self.settings.world_size > 1:
            end_process(reason, EXIT_GROUP_FAILED if self._fatal is None else self._fatal.exit_code)

    def _on_push(self, push: Push) -> None:
        match push:
            case MemberLost():
                log.warning("member lost", member=push.replica_id, quorum_id=push.quorum_id, reason=push.reason)
                known = self._members_lost.get(push.quorum_id, set())
                self._members_lost[push.quorum_id] = {*known, push.replica_id}
                self.evidence.member_lost(push.quorum_id)
                self._note_loss(push.quorum_id, f"{push.replica_id} is lost: {push.reason}")
            case RoundBroken():
                log.warning("round broken", quorum_id=push.quorum_id, reason=push.reason)
                self._note_loss(push.quorum_id, push.reason)
            case Drain():
                self.request_leave(push.reason or "drained")
            case Evicted():
                self._fatal = EvictedExit(push.reason)
                self._note_loss(-1, f"evicted: {push.reason}")
            case _:
                pass

    def _on_cut_off(self, quorum_id: int, reason: str) -> None:
        log.warning("step makes no progress; ending it", quorum_id=quorum_id, reason=reason)
        self._cut_off_in = quorum_id
        self._note_loss(quorum_id, reason)

    def _note_loss(self, quorum_id: int, reason: str) -> None:
        self._lost[quorum_id] = reason
        while len(self._lost) > REMEMBERED:
            oldest = next(iter(self._lost))
            del self._lost[oldest]
            self._members_lost.pop(oldest, None)
        self.on_lost(quorum_id, reason)

    def request_leave(self, reason: str) -> None:
        """Leave at the begin of a step. From any thread, and from a signal handler."""
        if self._leaving or self._ended:
            return
        self._leaving = reason
        if self._may_leave:
            self.loop_thread.loop.call_soon_threadsafe(self.link.request_leave, reason)

    # ---- quorums

    def ask(self, ask: RankAsk, timeout: float, *, may_leave: bool, waits: Callable[[], None]) -> QuorumPlan:
        """Return the quorum of the next step.

        Args:
            ask: number, time limit, settings and leave are filled in here.
            timeout: seconds.
            may_leave: False: an order to leave waits for a later step, so that no shard is lost with this member.
            waits: called on the event-loop thread if the answer takes long.

        Raises:
            TimeoutError: no quorum formed in time.
            SystemExit: training ends in this process.
            KeepstepError: the reason why no quorum forms.
        """
        if self._fatal is not None:
            raise self._fatal
        self._may_leave = may_leave
        leaving = self._leaving if may_leave else ""
        if self._leaving and not may_leave and not self._waits_to_leave:
            self._waits_to_leave = True
            log.info("leaving after the next step in which no shard is lost with this member", reason=self._leaving)
        if leaving and self.settings.world_size == 1:
            self._leave()
        if not self._requests:
            self._common = with_settings(self._common, dict(arithmetic({self._device_type})))
        self._requests += 1
        asked = replace(
            ask,
            request=self._requests,
            timeout_ms=max(1, round(timeout * 1000)),
            leaving=leaving,
            settings=self._common,
        )
        tries = 1 + self.settings.quorum_retries
        try:
            return self.loop_thread.call(self._asked(asked, waits), 2 * timeout * tries + CALL_MARGIN_SECONDS)
        except Leaving as error:
            raise Drained(str(error)) from error
        except Banned as error:
            raise EvictedExit(str(error)) from error
        except JobClosed as error:
            if error.finished:
                raise
            raise JobClosedExit(str(error)) from error
        except MachineDiffers as error:
            raise PreflightExit(str(error)) from error
        except LayoutMismatch as error:
            raise MismatchExit(str(error)) from error
        except SessionClosed as error:
            if self._fatal is not None:
                raise self._fatal from error
            raise

    async def _asked(self, ask: RankAsk, waits: Callable[[], None]) -> QuorumPlan:
        timer = asyncio.get_running_loop().call_later(REPORT_WAIT_SECONDS, waits)
        try:
            if (failure := await self.evidence.collect()) is not None:
                ask = replace(ask, failure=failure)
            plan = await self.link.ask(ask)
        finally:
            timer.cancel()
        self.evidence.begins(plan, self._progress)
        return plan

    def _leave(self) -> None:
        self.leave(self._leaving, leave_cause(self._leaving), None)
        raise Drained(self._leaving)

    def committed(self) -> None:
        """Note that a step has ended."""
        self.evidence.ended()
        self.link.activity.commits += 1
        self.link.finished_step()

    def shards(self, report: ShardReport) -> None:
        """Report the shard of this rank to the lighthouse."""
        self.loop_thread.loop.call_soon_threadsafe(self.link.shards, report)

    def leave(self, reason: str, cause: str, step: int | None) -> None:
        """Say goodbye to the lighthouse."""
        goodbye = self.link.leave(reason, LEAVE_SECONDS, cause=cause, step=step)
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):  # the member leaves without confirmation
            self.loop_thread.call(goodbye, LEAVE_SECONDS + 1.0)

    def fail(self, error: str) -> None:
        """Tell the other ranks of this member, and the lighthouse, that this process ends before its training does.

        Args:
            error: of the script; empty: none.
        """
        if self._ended or (not error and self.settings.world_size == 1):
            return
        self._ended = True
        reason = f"rank {self.settings.rank} ended {f'with {error}' if error else 'without finish()'}"
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):  # they notice the end of its connections
            self.loop_thread.call(self.link.fail(reason), FAILURE_REPORT_SECONDS)

    def end(self) -> None:
        """Say goodbye to the other ranks of this member, which end by themselves."""
        self._ended = True
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            self.loop_thread.call(self.link.close(), CALL_MARGIN_SECONDS)

    def close(self) -> None:
        """End the link and the thread."""
        self._termination.restore()
        self._watch.cancel()
        self.end()
        self.loop_thread.stop()
        self._store = None
