"""Agree with the other ranks and groups: whether all ranks are ready, the group's vote, and the digest of the state."""

from __future__ import annotations

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.runtime.exits import GroupFailedExit
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS
from keepstep.step.context import StepContext
from keepstep.step.first_error import FirstError
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.group_messages import RankVote
from keepstep_mesh.protocol.lineage import is_committed
from keepstep_mesh.protocol.membership import Lineage, StateRoot

POLL_TIMEOUTS = 4
"""A poll waits so many times ``timeout``, because the other ranks may still be in their forward pass."""


def vote(context: StepContext, plan: QuorumPlan, errors: FirstError, participants: int, seconds: float) -> bool:
    """Vote on the step of ``plan``, and return the group's decision. Without an error the vote is yes.

    Args:
        context: of this process.
        plan: of the quorum.
        errors: of the step.
        participants: number of groups that took part.
        seconds: limit, beside the time in which the other ranks wait for collectives.

    Raises:
        GroupFailedExit: this rank cannot learn the decision.
    """
    if errors.error is None and participants < context.min_replica_size:
        few = f"{participants} groups take part, min_replica_size is {context.min_replica_size}"
        errors.vote_no(KeepstepError(few))
    ok = errors.error is None
    if context.settings.world_size == 1:
        return ok
    ballot = RankVote(plan.epoch, plan.quorum_id, plan.max_step, plan.attempt, ok)
    # the other ranks may still wait for a collective and a heal; rank 0 notices at once when one of them dies
    committed = decision_on(context, ballot, seconds + 3 * context.timeout.total_seconds())
    if ok and not committed:
        errors.outvoted()
    return committed


def decision_on(context: StepContext, vote: RankVote, seconds: float, advice: str = "") -> bool:
    """Return the group's decision, within ``seconds``. ``advice``: for the case that the other ranks do not vote.

    Raises:
        GroupFailedExit: this rank cannot learn the decision.
    """
    try:
        return context.loop_thread.call(context.link.vote(vote, seconds), seconds + CALL_MARGIN_SECONDS)
    except (TimeoutError, KeepstepError, OSError) as error:
        reason = f"decision of the ranks at step {vote.step} unknown: {type(error).__name__}: {error}{advice}"
        context.fail_group(reason)
        raise GroupFailedExit(reason) from error


def all_ready(context: StepContext, ready: bool, waiting: float = 0.0, advice: str = "") -> bool:
    """Return whether all ranks of this group are ready. Call it equally often in all ranks after each vote.

    The first rank that is not ready decides, so that no rank waits for the others. A yes waits for all of them.

    Args:
        context: of this process.
        ready: whether this rank is.
        waiting: how long another rank may be busy before it calls this, in seconds, beside its forward pass.
        advice: as of ``decision_on``.

    Raises:
        GroupFailedExit: this rank cannot learn the decision.
    """
    if context.settings.world_size == 1:
        return ready
    context.polls += 1
    poll = RankVote(0, 0, context.progress.step, context.last_attempt, ready, context.polls)
    return decision_on(context, poll, waiting + POLL_TIMEOUTS * context.timeout.total_seconds(), advice)


def root_of(context: StepContext, plan: QuorumPlan) -> StateRoot | None:
    """Return the root digest of the reference state, if this group holds it and the lighthouse compares it.

    Call it in every rank, also after an error, because FSDP's ``state_dict`` is collective.
    """
    return _root_at(context, plan.max_step, plan.lineage) if plan.verify and not plan.behind else None


def final_root_of(context: StepContext) -> StateRoot | None:
    """Return the root digest of the state with which this group has taken its last step. Call it in every rank."""
    progress = context.progress
    final = is_committed(progress.lineage)  # else another group has the state of the job, or none is trained
    return _root_at(context, progress.step, progress.lineage) if final else None


def _root_at(context: StepContext, step: int, lineage: Lineage) -> StateRoot | None:
    if context.state.compared == frozenset():
        return None
    try:
        return StateRoot(step, lineage, context.state.root().hex())
    except Exception as error:  # noqa: BLE001  the step itself is not affected
        reason = f"{type(error).__name__}: {error}"
        context.log.error("state not compared with the other groups", step=step, reason=reason)
        return None
