"""Report the steps of this rank to the metrics service and to the step log, as a ``Manager`` does."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery
from keepstep.one_copy.core.world import World
from keepstep.one_copy.member_link import MemberLink
from keepstep.step.reporting.step_log import StepLog
from keepstep.step.reporting.step_telemetry import StepTelemetry, StepTimes
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.lineage import NEW, origin


class StepReports:
    """Members that wait for each other do so in the passes, so that the time of a step without waiting is unknown.

    Args:
        member: this one.

    Raises:
        ValueError: the step log cannot be opened.
    """

    def __init__(self, member: MemberLink) -> None:
        self._member = member
        self._log = StepLog(member.settings.job, member.replica_id, member.settings.rank)
        self._telemetry = StepTelemetry(member.loop_thread, member.link, member.settings)
        self._times = StepTimes(time.monotonic())
        self._own = f"{NEW}{member.replica_id}"
        """Lineage at the start of this process; empty: it has started."""

    def ask(self, ask: RankAsk, timeout: float, *, may_leave: bool, stands_by: bool) -> QuorumPlan:
        """Return the answer of ``MemberLink.ask``. The wait is measured, and told to the metrics service if it is long.

        Args:
            ask, timeout, may_leave: as there.
            stands_by: this member is a spare without a seat. Its first step begins after the wait.
        """
        began = time.monotonic()
        told = partial(self._telemetry.state, "standby" if stands_by else "waiting_quorum")
        try:
            return self._member.ask(ask, timeout, may_leave=may_leave, waits=told)
        finally:
            waited = time.monotonic() - began
            if stands_by:
                self._times.began += waited
            else:
                self._times.quorum_seconds += waited

    def recovered(self, plan: QuorumPlan, recovery: Recovery, state: State, *, built: bool, seconds: float) -> None:
        """Note a recovery.

        Args:
            plan: of the quorum.
            recovery: its plan.
            state: of this rank now.
            built: this rank has read its shard.
            seconds: duration.
        """
        self._times.heal_seconds += seconds
        if self._own:
            lineage = state.lineage if recovery.kind is Kind.FRESH else self._own
            self._log.write("started", 0, 0, lineage=lineage)
            self._own = ""
        if recovery.kind is Kind.RESUMED:
            self._log.write("loaded", state.step, 0, lineage=state.lineage)
        self._log.quorum(state.step, plan, built=True)
        if built and recovery.kind not in (Kind.FRESH, Kind.RESUMED):
            facts = {"epoch": plan.epoch, "lineage": state.lineage, "source": "", "seconds": seconds, "bytes": 0}
            self._log.write("healed", state.step, plan.quorum_id, **facts)

    def committed(self, plan: QuorumPlan, before: State, after: State) -> None:
        """Note a step that this rank has learned to be committed in the quorum of ``plan``."""
        members = len(plan.replica_ids)
        facts: dict[str, object] = {"epoch": plan.epoch, "participants": members, "lineage": before.lineage}
        if after.lineage != plan.quorum_id:
            facts["new_lineage"] = after.lineage
        self._log.write("committed", after.step, plan.quorum_id, **facts)
        self._telemetry.step(self._ended(), after.step, plan, members, committed=True)

    def forwarded(self, epoch: int, world: World | None, before: State, after: State) -> None:
        """Note a step whose commit this rank has learned only in the recovery after it.

        Args:
            epoch: of the recovery.
            world: in which the ranks have voted.
            before, after: states of this rank.
        """
        members = len(world.seats) if world is not None else 0
        facts: dict[str, object] = {"epoch": epoch, "participants": members, "lineage": before.lineage}
        quorum_id = origin(after.lineage).quorum_id
        if after.lineage != quorum_id:
            facts["new_lineage"] = after.lineage
        self._log.write("committed", after.step, quorum_id, **facts)

    def discarded(self, plan: QuorumPlan | None, state: State, reason: str) -> None:
        """Note an attempt that was not committed."""
        epoch, quorum_id = (plan.epoch, plan.quorum_id) if plan is not None else (0, 0)
        self._log.write("discarded", state.step, quorum_id, epoch=epoch, reason=reason)
        self._telemetry.step(self._ended(), state.step, plan, 0, committed=False, reason=reason[:500])

    def _ended(self) -> StepTimes:
        times, self._times = self._times, StepTimes(time.monotonic())
        return times

    def durable(self, step: int, every: int, nbytes: int, seconds: float, error: str) -> None:
        """Note the end of a durable checkpoint."""
        self._telemetry.durable(step, every, nbytes, seconds, error)

    def resumed(self, step: int, every: int, committed: float, skipped: Iterable[str]) -> None:
        """Note the durable checkpoint from which the job resumed. See ``StepTelemetry.resumed``."""
        self._telemetry.resumed(step, every, committed, skipped)

    def close(self) -> None:
        """End the log, and send the last records."""
        self._telemetry.close()
        self._log.close()
