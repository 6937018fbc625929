"""Agree with the other ranks and groups at the end of a step: the group's vote, and the digest of the state."""

from __future__ import annotations

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.runtime.exits import GroupFailedExit
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS
from keepstep.step.context import StepContext
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.group_messages import RankVote
from keepstep_mesh.protocol.membership import StateRoot


def decision_on(context: StepContext, vote: RankVote, seconds: float) -> bool:
    """Return the group's decision, within ``seconds``.

    Raises:
        GroupFailedExit: this rank cannot learn the decision.
    """
    try:
        return context.mesh.call(context.link.vote(vote, seconds), seconds + CALL_MARGIN_SECONDS)
    except (TimeoutError, KeepstepError, OSError) as error:
        reason = f"commit decision of step {vote.step} unknown: {type(error).__name__}: {error}"
        context.fail_group(reason)
        raise GroupFailedExit(reason) from error


def root_of(context: StepContext, plan: QuorumPlan) -> StateRoot | None:
    """Return the root digest of the reference state, if this group holds it and the lighthouse compares it.

    Call it in every rank, also after an error, because FSDP's ``state_dict`` is collective.
    """
    if not plan.verify or plan.heal or context.state.compared == frozenset():
        return None
    try:
        return StateRoot(plan.max_step, plan.lineage, context.state.root().hex())
    except Exception as error:  # noqa: BLE001  the step itself is not affected
        reason = f"{type(error).__name__}: {error}"
        context.log.error("state not compared with the other groups", step=plan.max_step, reason=reason)
        return None
