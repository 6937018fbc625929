"""Count a step as committed or discarded, and report it to the step log and the metrics service."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.step.context import StepContext
from keepstep.step.reporting.step_telemetry import StepTimes


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of one step of this rank."""

    context: StepContext
    times: StepTimes
    plan: QuorumPlan | None
    """Of the last try; None: no quorum formed."""
    participants: int
    """Number of groups that took part."""
    nonfinite: bool
    """This group contributed a NaN or an infinity."""
    retries: int
    """Number of retries of the step."""

    def commit(self, plan: QuorumPlan, *, behind: bool, synchronized: bool) -> None:
        """Count the step as committed.

        Args:
            plan: of the quorum.
            behind: the group took part without healing.
            synchronized: the script declared all groups equal after the step.
        """
        context, progress = self.context, self.context.progress
        facts = {"epoch": plan.epoch, "participants": self.participants, "lineage": progress.lineage}
        if behind:
            facts["behind"] = True
        if synchronized:
            facts["synchronized"] = True
            batches = (plan.reference_batches if behind else 0) or progress.batches_committed
            progress.commit_synchronized(plan.max_step, plan.lineage, batches, plan.quorum_id, self.participants)
        else:
            progress.commit(plan.quorum_id, self.participants, behind=behind)
        context.link.activity.commits += 1
        if progress.lineage != plan.quorum_id:
            facts["new_lineage"] = progress.lineage
        context.steps.write("committed", progress.step, plan.quorum_id, **facts)
        context.telemetry.step(
            *(self.times, progress.step, plan, self.participants),
            committed=True,
            nonfinite=self.nonfinite,
            retries=self.retries,
        )

    def discard(self, reason: str) -> None:
        """Count the step as discarded."""
        context, progress = self.context, self.context.progress
        progress.discard()
        epoch, quorum_id = (self.plan.epoch, self.plan.quorum_id) if self.plan else (0, 0)
        context.steps.write("discarded", progress.step, quorum_id, epoch=epoch, reason=reason)
        context.telemetry.step(
            *(self.times, progress.step, self.plan, 0),
            committed=False,
            reason=reason[:500],
            nonfinite=self.nonfinite,
            retries=self.retries,
        )
