"""One quorum of a step: request it, build its process group, and exchange live state in it.

A group that is behind heals in the quorum: before the forward pass (``heals_first``), or in ``Attempt.conclude``. A
group that can catch up follows the others instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.step.context import StepContext
from keepstep.step.first_error import FirstError
from keepstep.step.healing import StateExchange
from keepstep.step.quorums.pending_quorum import PendingQuorum
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.lineage import is_diverged
from keepstep_mesh.protocol.membership import UNKNOWN
from keepstep_mesh.protocol.messages import Healing
from keepstep_mesh.telemetry.tracing.spans import RECONFIGURE

NO_SOURCE_FOR_TORN_STATE = (
    "a failed heal or optimizer step left this group's state half written, and this step cannot repair it: the quorum "
    "has no healthy group to heal from, or healing is not allowed. Restart the group from its last checkpoint"
)

HOW_TO_KEEP_EQUAL = (
    "run the same script with the same settings in all groups, and register all state that training changes: model, "
    "optimizer, scheduler, own counters; docs/footguns.md lists the usual causes"
)

HOW_TO_AGREE = (
    "compute learning rates and the like from manager.current_step(), or register what computes them, such as a "
    "scheduler; a group that differs again is refused"
)


@dataclass(frozen=True, slots=True)
class HealRules:
    """When the groups of a step heal."""

    allow_heal: bool
    """False: a group that is behind takes part as it is."""
    sync: bool
    """Groups heal before the forward pass, and take part."""
    first_step: bool
    """The same, if no group of the job has committed a step."""


class QuorumRound:
    """A quorum, from the request on.

    Args:
        context: of this process.
        ask: the request of this rank.
        rules: of the step.
        times: the seconds of the quorum and of heals are added here.
        errors: of the step. Errors of the process group are reported here.
    """

    def __init__(
        self, context: StepContext, ask: RankAsk, rules: HealRules, times: StepTimes, errors: FirstError
    ) -> None:
        self.answered: QuorumPlan | None = None
        """Set on the event-loop thread, as soon as the quorum has formed."""
        self.plan: QuorumPlan | None = None
        """Set on the training thread, after it has waited for the quorum and its process group."""
        self.allow_heal = rules.allow_heal
        """Whether groups heal; False if one member of the quorum does not allow it, known with the answer."""
        self.heals_first = rules.sync
        """Whether every heal of this quorum ends before the forward pass; known with the answer."""
        self.begins_to_follow = False
        """Whether this group follows the others instead of healing; known with the answer."""
        self._context = context
        self._rules = rules
        self._times = times
        self._errors = errors
        self._exchange: StateExchange | None = None
        """Set with ``answered``."""
        self._objection: Exception | None = None
        """Why no group must commit this step, known with the answer. This group keeps its state then."""
        context.source = context.follower.source if context.follower is not None else ""
        self._request = PendingQuorum(context, self._form(ask), ask.timeout_ms / 1000)

    async def _form(self, ask: RankAsk) -> QuorumPlan:
        """Get the quorum and rebuild the process group for it. On the event-loop thread."""
        context, trace = self._context, self._times.trace
        trying = None if trace is None else trace.request(time.monotonic())
        if (evidence := await context.evidence.collect()) is not None:
            ask = replace(ask, failure=evidence)
        plan = await context.link.ask(ask)
        if trying is not None:
            trying.formed(plan.quorum_id, plan.quorum.created_ms, plan.max_step, plan.attempt, time.monotonic())
        context.evidence.begins(plan, self._times)
        context.root = None
        if plan.quorum.differ and context.settings.rank == 0:
            context.log.error("weights of groups differ", reason=plan.quorum.differ, remedy=HOW_TO_KEEP_EQUAL)
        if plan.quorum.went_back_from:
            lost = plan.quorum.went_back_from - plan.max_step
            context.log.warning(
                "the job went back", from_step=plan.quorum.went_back_from, to_step=plan.max_step, lost_steps=lost
            )
        self._prepare_heal(plan)
        began, built, failure = time.monotonic(), True, ""
        try:
            built = await context.reconfigurer.follow(plan)
            context.steps.quorum(context.progress.step, plan, built=built)
        except Exception as error:  # noqa: BLE001  any error of the process group fails the step
            failure = f"{type(error).__name__}: {error}"
            self._errors.report_of_peers(error)
        if trying is not None and built:
            trying.phase(RECONFIGURE, began, time.monotonic(), failure, members=len(plan.members))
        if self._objection is not None:
            # before any collective, so that no other group commits the step
            self._errors.report(self._objection, cause=UNKNOWN)
        return plan

    def _prepare_heal(self, plan: QuorumPlan) -> None:
        """Decide how the groups of this quorum heal, and report it if this one does."""
        context, rules = self._context, self._rules
        self.allow_heal = plan.allow_heal and (rules.allow_heal or plan.finishing)
        self.heals_first = rules.sync or not self.allow_heal or (rules.first_step and plan.first_step)
        together = self.heals_first or plan.finishing
        self._exchange = StateExchange(context, plan, self._times, allow_heal=self.allow_heal, together=together)
        self._objection = context.follower.objection(plan) if context.follower is not None else None
        self.answered = plan
        self.begins_to_follow = self._objection is None and self._can_follow(plan)
        if plan.destinations or not plan.followers:  # else a follower may still have to begin to read its base
            context.transport.disallow_checkpoint()  # readers of the last step's state are done, or too late
        if context.follower is not None and self._exchange.hands_out and not self.heals_first:
            context.follower.hands_out(plan)
        if plan.source is not None and self.allow_heal:
            context.source = plan.members[plan.source].replica_id
            if not self.begins_to_follow and self._objection is None:
                context.link.healing(Healing(0, 0, 0.0, plan.max_step, context.source))

    def _can_follow(self, plan: QuorumPlan) -> bool:
        follower = self._context.follower
        heals = self.heals_at_end(plan) and not plan.finishing
        return heals and follower is not None and follower.can_begin(plan)

    @property
    def formed(self) -> bool:
        """Whether the quorum has formed, and its process group is built or has failed."""
        return self._request.done and not self._request.failed

    @property
    def failed(self) -> bool:
        """Whether the request has ended without a quorum."""
        return self._request.failed

    def withdraw(self) -> None:
        """Cancel the request."""
        self._request.withdraw()

    def wait(self, *, may_resume: bool = False) -> QuorumPlan:
        """Wait for the quorum and return its plan. See ``PendingQuorum.wait`` for ``may_resume`` and errors."""
        context = self._context
        if self.plan is None:
            self.plan = self._request.wait(self._times, may_resume=may_resume)
            if self.plan.diverged and not is_diverged(context.progress.lineage):
                context.diverge()
                self._name_other_values(self.plan)
        torn = context.progress.torn or self.plan.torn  # a group is torn if one of its ranks is
        if torn and not (self.plan.heal and self.allow_heal):
            context.end_with(KeepstepError(NO_SOURCE_FOR_TORN_STATE))
        return self.plan

    def _name_other_values(self, plan: QuorumPlan) -> None:
        """Log in what the optimizers of this group differ from those of the group that it heals from, if they do."""
        context = self._context
        if context.last_step is not None and context.last_step.values and plan.source is not None:
            difference = context.values_difference_from(plan.members[plan.source].info.address)
            if difference:
                context.log.error("optimizers stepped with other values", reason=difference, remedy=HOW_TO_AGREE)

    def participation(self, plan: QuorumPlan) -> tuple[int | None, int]:
        """Return this group's number among those that take part (None: it does not), and their number."""
        context = self._context
        return plan.participation(context.world_size_mode, context.min_replica_size, healed_before=self.heals_first)

    def heals_at_end(self, plan: QuorumPlan) -> bool:
        """Return whether this group is behind, and heals at the end of the step."""
        return plan.heal and self.allow_heal and not self.heals_first and not self.begins_to_follow

    # ---- live state

    def exchange_state(self) -> Exception | None:
        """Hand out live state, or heal. Return the error that broke this group's heal."""
        if self._exchange is None or self.begins_to_follow or self._objection is not None:
            return None
        return self._exchange.run()

    def refuse_joiners(self, reason: str) -> None:
        """Tell the groups that heal from this one that its state does not come in this step."""
        if self._exchange is not None:
            self._exchange.refuse(reason)

    def begin_to_follow(self, plan: QuorumPlan) -> None:
        """Begin to catch up, if this group follows the others from this step on, which commits."""
        follower = self._context.follower
        if self.begins_to_follow and self._exchange is not None and follower is not None:
            follower.begin(plan, self._exchange.parties())

    @property
    def heal_seconds(self) -> float:
        """Time that a heal of this quorum may take; 0 without a limit."""
        return (self._exchange.limit if self._exchange is not None else None) or 0.0

    @property
    def healed(self) -> bool:
        """Whether this group has taken over the reference state."""
        return self._exchange is not None and self._exchange.healed
