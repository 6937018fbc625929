"""How a group ends its part in the job: it is drained, replaced or evicted, it loses a rank, or its script ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import NoReturn

from keepstep.group.group_link import LinkSettings
from keepstep.group.group_server import LEAVE_SECONDS
from keepstep.runtime.exits import (
    EvictedExit,
    PrintedExit,
    TerminationFlag,
    end_process,
    leave_cause,
)
from keepstep.session.session_events import Push
from keepstep.step.context import StepContext
from keepstep_mesh.errors import Drained, KeepstepError
from keepstep_mesh.exit_codes import EXIT_GROUP_FAILED
from keepstep_mesh.protocol.messages import Drain, Evicted, MemberLost, RoundBroken


class GroupMembership:
    """Acts on what the lighthouse pushes and on SIGTERM.

    Pushes that arrive before ``start`` are kept until then.

    Args:
        settings: of this rank's link.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self.ended = False
        """Whether the Manager was shut down."""
        self._settings = settings
        self._context: StepContext | None = None
        self._termination: TerminationFlag | None = None
        self._replayed = False
        self._watch: concurrent.futures.Future[None] | None = None
        """Probes steps that make no progress, until the membership ends."""
        self._early: list[Push] = []
        """Pushes that arrived before ``start``."""

    def start(self, context: StepContext) -> None:
        """Act on pushes and on SIGTERM from now on."""
        self._context = context
        self._termination = TerminationFlag(self.leave_soon)
        context.loop_thread.loop.call_soon_threadsafe(self._replay_early)
        self._watch = context.loop_thread.spawn(context.evidence.watch())

    def _replay_early(self) -> None:
        self._replayed = True
        for push in self._early:
            self.on_push(push)

    # ---- from the group and the lighthouse

    def on_group_failed(self, reason: str) -> None:
        """End this process, because the group has lost one of its ranks. On the event-loop thread."""
        if not self.ended and self._settings.world_size > 1:
            fatal = self._context.fatal if self._context is not None else None
            end_process(reason, fatal.exit_code if isinstance(fatal, PrintedExit) else EXIT_GROUP_FAILED)

    def on_push(self, push: Push) -> None:
        """Act on a message that the lighthouse sent without a request. On the event-loop thread."""
        context = self._context
        if context is None or not self._replayed:
            self._early.append(push)
            return
        match push:
            case MemberLost():
                context.evidence.member_lost(push.quorum_id)
                context.log.warning("member lost", member=push.replica_id, quorum_id=push.quorum_id, reason=push.reason)
                context.reconfigurer.lost(push.quorum_id, f"{push.replica_id} is lost: {push.reason}")
                if context.heals.source == push.replica_id:
                    context.transport.source_lost(f"{push.replica_id}: {push.reason}")
            case RoundBroken():
                goes_on = context.asks.min_groups > 0  # others may go on without it
                log = context.log.info if goes_on else context.log.warning
                log("round broken", quorum_id=push.quorum_id, reason=push.reason)
                context.reconfigurer.lost(push.quorum_id, push.reason)
            case Drain():
                self.request_leave(push.reason or "drained")
            case Evicted():
                context.end_later(EvictedExit(push.reason))
                context.reconfigurer.abort(f"evicted: {push.reason}")
            case _:
                pass

    # ---- leaving

    def leave_soon(self, reason: str, notice: float | None = None) -> None:
        """Leave, or let a spare replace this group within the time of the notice.

        Any thread may call it, and a signal handler.

        Args:
            reason: for the log and the lighthouse.
            notice: seconds; None: those of ``KEEPSTEP_NOTICE_SEC``.
        """
        context, notice = self._context, self._settings.notice if notice is None else notice
        if context is None or self.ended or not notice or context.asks.stands_by:
            self.request_leave(reason)
            return
        context.asks.leaves_soon = f"{reason} with {notice:g} s of notice"
        loop = context.loop_thread.loop
        loop.call_soon_threadsafe(loop.call_later, notice, self.request_leave, reason)

    def request_leave(self, reason: str) -> None:
        """Leave the job at the next step boundary. From any thread, and from a signal handler."""
        context = self._context
        if context is not None and not context.asks.leaving and not self.ended:
            context.asks.leaving = reason
            context.loop_thread.loop.call_soon_threadsafe(context.link.request_leave, reason)

    def leave(self, context: StepContext) -> NoReturn:
        """Say goodbye to the lighthouse, and raise Drained."""
        seconds, reason = context.timeout.total_seconds(), context.asks.leaving
        goodbye = context.link.leave(
            reason, min(seconds, LEAVE_SECONDS), cause=leave_cause(reason), step=context.progress.step
        )
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):  # the group leaves without confirmation then
            context.loop_thread.call(goodbye, seconds)
        context.end_with(Drained(reason))

    def end(self, context: StepContext, limit: float, error: str, *, in_step: bool) -> None:
        """End the membership with the Manager.

        Args:
            context: of this process.
            limit: seconds for the goodbye.
            error: with which the script ends; empty: none.
            in_step: the group is in the middle of a step. Then it says no goodbye, so that its peers learn that it is
                lost, and why, and its other ranks end.
        """
        if self._watch is not None:
            self._watch.cancel()
        if context.fatal is None and not in_step:
            step = context.progress.step
            reason, cause = "shutdown", "finished"
            if context.asks.leaving:
                reason, cause = context.asks.leaving, leave_cause(context.asks.leaving)
            elif error:
                reason, cause = f"the script ended with {error}", "failed"
            try:
                context.loop_thread.call(context.link.leave(reason, limit, cause=cause, step=step), limit + 1.0)
            except (TimeoutError, KeepstepError, OSError) as problem:
                context.log.info("left without confirmation", reason=f"{type(problem).__name__}: {problem}")
        elif in_step and (self._settings.world_size > 1 or error):
            why = f" with {error}" if error else ""
            context.ranks.fail_group(f"rank {self._settings.rank} ended in the middle of a step{why}")

    def stop_acting(self) -> None:
        """Ignore SIGTERM and the end of the group from now on; the handler from before gets the signal again."""
        self.ended = True
        if self._termination is not None:
            self._termination.restore()
