"""The quorums of one step, one after the other: heal in them before the forward pass, until no member is behind.

Only a synchronous or first step heals before its forward pass. The lighthouse waits up to ``heal_timeout`` for groups
that still heal; a collective would wait for them up to its own timeout. So all groups, and all ranks of a group,
request another quorum after a heal. All of them decide it from the quorum.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.runtime.exits import StartRefusedExit
from keepstep.state.errors import StatesMissing
from keepstep.step.context import StepContext
from keepstep.step.first_error import FirstError
from keepstep.step.quorums.quorum_round import HealRules, QuorumRound
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep_mesh.errors import KeepstepError, StartRefused
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.lineage import is_live
from keepstep_mesh.protocol.membership import UNKNOWN

MAX_HEAL_ROUNDS = 5
"""Quorums in a row in which groups heal before the step; after these the step fails, so that an operator sees it."""


class Rounds:
    """The quorums of one step.

    Args:
        context: of this process.
        rules: of the step.
        times: of the step.
        errors: of the step; heals that fail are reported here.
    """

    def __init__(self, context: StepContext, rules: HealRules, times: StepTimes, errors: FirstError) -> None:
        self.current: QuorumRound | None = None
        """The last one that was requested."""
        self._context = context
        self._rules = rules
        self._times = times
        self._errors = errors

    def request(self, ask: RankAsk) -> None:
        """Request a quorum, and return."""
        self.current = QuorumRound(self._context, ask, self._rules, self._times, self._errors)

    def wait(self) -> QuorumPlan:
        """Wait for the current quorum and its process group. See ``PendingQuorum.wait`` for errors.

        Raises:
            RuntimeError: none was requested.
        """
        if self.current is None:
            raise RuntimeError("no quorum was requested for this step; call begin() first")
        return self.current.wait()

    @property
    def plan(self) -> QuorumPlan | None:
        """The plan of the current quorum, once the training thread has waited for it."""
        return self.current.plan if self.current is not None else None

    def participation(self, plan: QuorumPlan) -> tuple[int | None, int]:
        """Return this group's number among those that take part (None: it does not), and their number."""
        return self.current.participation(plan) if self.current is not None else (None, 0)

    def exchange_state(self) -> Exception | None:
        """Hand out live state, or heal. Return the error that broke this group's heal."""
        return self.current.exchange_state() if self.current is not None else None

    def refuse_joiners(self, reason: str) -> None:
        """Tell the groups that heal from this one that its state does not come in this step."""
        if self.current is not None:
            self.current.refuse_joiners(reason)

    def resume_without_live_state(self, ask: RankAsk) -> None:
        """Load a durable checkpoint, and ask again, if the groups with a live state are gone since this one connected.

        All members find out from the quorum, or because the job does not begin at their state. If only some of them can
        load one, the others heal from them.
        """
        context, current = self._context, self.current
        if context.resume is None or current is None:
            return
        plan: QuorumPlan | None = None
        refused = ""
        try:
            plan = current.wait(may_resume=True)
        except StartRefused as error:
            refused = str(error)
        resume, context.resume = context.resume, None
        if plan is not None and is_live(plan.max_step, plan.lineage):
            return
        if resume(plan):
            current.refuse_joiners("this group resumed from a durable checkpoint")
            self._request_again(current, ask, 0)
        elif refused:
            context.end_with(StartRefusedExit(refused))

    def heal(self, ask: RankAsk) -> None:
        """In a synchronous or first step: exchange live state and ask again, until no member of the quorum heals."""
        failed: list[Exception] = []
        for tried in range(MAX_HEAL_ROUNDS if self._rules.sync or self._rules.first_step else 0):
            plan, current = self.wait(), self.current
            if current is None or not (current.heals_first and current.allow_heal and plan.healing):
                return
            if (error := current.exchange_state()) is not None:
                self._context.log.warning("heal failed", step=plan.max_step, tried=tried + 1, reason=str(error))
                self._context.check_heal(error)
                failed.append(error)
            if plan.finishing or isinstance(error, StatesMissing):  # the script may register them before the next step
                if failed:
                    self._errors.report(failed[-1], cause=UNKNOWN)
                return
            if tried + 1 < MAX_HEAL_ROUNDS:
                self._request_again(current, ask, len(failed))
            else:
                others = KeepstepError(f"in {MAX_HEAL_ROUNDS} quorums in a row a group had to heal before the step")
                self._errors.forget()
                self._errors.report(failed[-1] if failed else others, cause=UNKNOWN)

    def _request_again(self, last: QuorumRound, ask: RankAsk, failed_heals: int) -> None:
        """Request another quorum for the same step, after live state was exchanged."""
        context, progress = self._context, self._context.progress
        context.read_layout()  # the load may have unfrozen parameters
        again = replace(
            ask,
            layout=context.layout_digest,
            step=progress.step,
            lineage=progress.lineage,
            batches_committed=progress.batches_committed,
            commit_failures=max(failed_heals, 1 if context.reconfigurer.broken else 0),
            timeout_ms=ask.timeout_ms + round(last.heal_seconds * 1000),
            root=None,
            leaving=context.leaving,
        )
        self._errors.forget()
        self.request(again)
