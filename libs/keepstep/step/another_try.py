"""Ask the ranks whether they all take a failed step again, and ask the lighthouse for a quorum of the same step."""

from __future__ import annotations

from dataclasses import replace

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.step.agreeing import all_ready
from keepstep.step.context import StepContext
from keepstep.step.retrying import retry_rules
from keepstep.step.retrying.retry_rules import FailedTry
from keepstep_mesh.protocol.group_messages import RankAsk

TOO_LATE = "other groups have committed this step, so it cannot be retried"


def is_wanted(context: StepContext, plan: QuorumPlan, failed: FailedTry) -> bool:
    """Return whether all ranks take the step again. Call it in every rank after a try that did not commit.

    Raises:
        GroupFailedExit: this rank cannot learn what the other ranks say.
    """
    context.ended_attempt(plan.attempt)  # the poll follows the vote on this try
    why_not = retry_rules.obstacle(failed)
    ready = all_ready(context, not why_not)
    if why_not:
        context.log.warning("step not retried", step=plan.max_step, reason=why_not)
    elif not ready:
        context.log.warning("step not retried", step=plan.max_step, reason="another rank of this group cannot")
    return ready


def ask(context: StepContext, timeout: float, *, allow_heal: bool) -> RankAsk:
    """Build this rank's request for a quorum of the step that failed; ``timeout`` in seconds.

    Without new groups, which have no gradients for it. A group that is about to leave takes the step first.
    """
    wanted = context.next_ask(timeout, allow_heal=allow_heal, shrink_only=True)
    return replace(wanted, retry=True, leaving="", commit_failures=max(1, wanted.commit_failures))


def write(context: StepContext, plan: QuorumPlan, reason: str) -> None:
    """Write to the logs that the group repeats the step."""
    context.log.info("retrying the step", step=plan.max_step, reason=reason)
    context.steps.write("retried", context.progress.step, plan.quorum_id, epoch=plan.epoch, reason=reason)
    context.telemetry.state("retrying")
