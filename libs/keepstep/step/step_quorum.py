"""The quorum of a step: request it, wait for it, and exchange live state in it, until the step can begin or end.

The event-loop thread sends the request and rebuilds the process group; the training thread waits only where it needs
the answer. A group that is behind heals in the quorum: before the forward pass (``heals_first``), or at the end of the
step. A group that can catch up follows the others instead.

Only a synchronous or first step heals before its forward pass. The lighthouse waits up to ``heal_timeout`` for groups
that still heal; a collective would wait for them up to its own timeout. So all groups, and all ranks of a group,
request another quorum after a heal. All of them decide it from the quorum.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from dataclasses import dataclass, replace
from typing import NoReturn

from keepstep.group.agreement import LayoutChanges, PartsMissing
from keepstep.group.quorum_plan import Participation, QuorumPlan, plan_of_closed_job
from keepstep.group.ranks.merging import DisagreeError
from keepstep.group.ranks.rank_link import Leaving
from keepstep.group.turns import described, out_of_turn
from keepstep.runtime.exits import (
    CollectivesExit,
    DivergedExit,
    EvictedExit,
    GroupFailedExit,
    JobClosedExit,
    MismatchExit,
    PreflightExit,
    StartRefusedExit,
    leave_cause,
)
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS
from keepstep.state.errors import StatesMissing
from keepstep.step.context import StepContext
from keepstep.step.first_error import FirstError
from keepstep.step.healing import StateExchange, heal_seconds
from keepstep.step.reporting.step_telemetry import REPORT_WAIT_SECONDS, StepTimes
from keepstep_mesh.errors import (
    Banned,
    CollectivesMismatch,
    Drained,
    JobClosed,
    KeepstepError,
    LayoutMismatch,
    MachineDiffers,
    ReplicasDiverged,
    SessionClosed,
    StartRefused,
)
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.lineage import is_diverged
from keepstep_mesh.protocol.membership import OWN, UNKNOWN
from keepstep_mesh.protocol.messages import Healing
from keepstep_mesh.telemetry.tracing.spans import RECONFIGURE

MISMATCH_LINGER_SECONDS = 0.5
"""Time that a refused group still serves its parameters, for another refused group that looks for the difference."""
WITHDRAW_SECONDS = 2.0
"""Limit for the event loop thread to hear that a request is withdrawn."""

HOW_TO_COMPLETE = (
    "; make all models, optimizers and samplers before the first start_quorum(), or as soon as manager.current_step() "
    "is at least the step at which the other groups made them"
)
MAX_HEAL_ROUNDS = 5
"""Quorums in a row in which groups heal before the step; after these the step fails, so that an operator sees it."""

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
    "scheduler; load frozen parameters from one file in all groups, or register them; a group that differs again is "
    "refused"
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


class StepQuorum:
    """The quorum of a step, which may be requested several times.

    Args:
        context: of this process.
        rules: of the step.
        times: the seconds of the quorum and of heals are added here.
        errors: of the step. Errors of the process group, and heals that fail, are reported here.
        turn: of ``turns``, in a script with several optimizers; empty: it is not compared.
    """

    def __init__(
        self, context: StepContext, rules: HealRules, times: StepTimes, errors: FirstError, turn: str = ""
    ) -> None:
        self._context = context
        self._rules = rules
        self._times = times
        self._errors = errors
        self._turn = turn
        self._seconds = 0.0
        """Limit of the last request."""
        self._request: concurrent.futures.Future[QuorumPlan] | None = None
        """The last one; None: none was made."""
        self._forget()

    def _forget(self) -> None:
        """Forget the last answer."""
        self.answered: QuorumPlan | None = None
        """Set on the event-loop thread, as soon as the quorum has formed."""
        self.plan: QuorumPlan | None = None
        """Set on the training thread, after it has waited for the quorum and its process group."""
        self.participation: Participation = (None, 0)
        """Of this group, set with ``plan``."""
        self.allow_heal = self._rules.allow_heal
        """Whether groups heal; False if one member of the quorum does not allow it, known with the answer."""
        self.heals_first = self._rules.sync
        """Whether every heal of this quorum ends before the forward pass; known with the answer."""
        self._begins_to_follow = False
        """Whether this group follows the others instead of healing; known with the answer."""
        self._exchange: StateExchange | None = None
        """Set with ``answered``; None: no group heals."""
        self._skips = False
        """Whether another optimizer has its turn in the job, and this group, which is behind, leaves the step out."""
        self._objection: Exception | None = None
        """Why no group must commit this step, known with the answer. This group keeps its state then."""
        self._changes: LayoutChanges | None = None
        """Raised by every wait, once it was raised."""

    # ---- a request

    def request(self, ask: RankAsk) -> None:
        """Request a quorum, and return. The last request must have ended."""
        context = self._context
        self._forget()
        self._seconds = ask.timeout_ms / 1000
        context.heals.source = context.follower.source if context.follower is not None else ""
        self._request = context.loop_thread.spawn(self._form(ask))

    @property
    def requested(self) -> bool:
        """Whether a quorum was requested."""
        return self._request is not None

    @property
    def formed(self) -> bool:
        """Whether the quorum has formed, and its process group is built or has failed."""
        return self._request is not None and self._request.done() and not self.failed

    @property
    def failed(self) -> bool:
        """Whether the request has ended without a quorum."""
        request = self._request
        return request is not None and request.done() and (request.cancelled() or request.exception() is not None)

    def withdraw(self) -> None:
        """Cancel the request. When this returns, its coroutine has heard of it."""
        if self._request is not None and self._request.cancel():
            ended = (concurrent.futures.CancelledError, RuntimeError)
            with contextlib.suppress(TimeoutError, *ended):  # the loop is busy, ends, or has ended
                self._context.loop_thread.call(asyncio.sleep(0), WITHDRAW_SECONDS)

    def report(self, error: Exception) -> None:
        """Report an error of this group. Once the process group of the quorum has failed, that is the cause."""
        follows = self.formed and self._context.reconfigurer.failed
        self._errors.report(error, cause=UNKNOWN if follows else OWN)

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
        context.asks.root = None
        if plan.quorum.differ and context.settings.rank == 0:
            context.log.error("weights of groups differ", reason=plan.quorum.differ, remedy=HOW_TO_KEEP_EQUAL)
        if plan.quorum.went_back_from:
            lost = plan.quorum.went_back_from - plan.max_step
            context.log.warning(
                "the job went back", from_step=plan.quorum.went_back_from, to_step=plan.max_step, lost_steps=lost
            )
        self._prepare_heal(plan)
        began, built, waits, failure = time.monotonic(), True, False, ""
        try:
            built = await context.reconfigurer.follow(plan, self._turn)
            context.steps.quorum(context.progress.step, plan, built=built)
        except Exception as error:  # noqa: BLE001  any error of the process group fails the step
            failure = f"{type(error).__name__}: {error}"
            waits = self._waits_for_turn(plan)
            if not waits and self._objection is None:
                self._errors.report_of_peers(error)
        if trying is not None and built:
            trying.phase(RECONFIGURE, began, time.monotonic(), failure, members=len(plan.members))
        if waits:
            self._forget()
            return await self._form(replace(ask, root=None, commit_failures=max(1, ask.commit_failures)))
        if self._objection is not None:
            # before any collective, so that no other group commits the step
            self._errors.report(self._objection, cause=UNKNOWN)
        return plan

    def _waits_for_turn(self, plan: QuorumPlan) -> bool:
        """Compare the turns of the members. Return whether this group requests another quorum of the same step.

        A group that is behind, and began the step with another optimizer than the cohort, takes over the number of the
        step and leaves it out: its script then comes to the optimizer whose turn it is. The others wait for it.
        """
        turns = self._context.reconfigurer.turns
        others = out_of_turn(turns, plan.cohort)
        if not others:
            return False
        if plan.replica_rank not in others and all(rank in plan.healing for rank in others):
            return True
        self._skips = plan.behind and plan.replica_rank in others
        peer = plan.cohort[0] if plan.replica_rank in others else others[0]
        self._objection = KeepstepError(
            f"the step was begun by {described(turns[plan.replica_rank])}, and in "
            f"{plan.members[peer].replica_id} by {described(turns[peer])}: let manager.current_step() decide "
            f"which optimizer begins a step, or let them take turns in the same order in all groups"
        )
        return False

    def _prepare_heal(self, plan: QuorumPlan) -> None:
        """Decide how the groups of this quorum heal, and report it if this one does."""
        context, rules = self._context, self._rules
        self.allow_heal = plan.allow_heal and (rules.allow_heal or plan.finishing)
        self.heals_first = rules.sync or not self.allow_heal or (rules.first_step and plan.first_step)
        together = self.heals_first or plan.finishing
        heals = self.allow_heal and plan.healing
        exchange = StateExchange(context, plan, self._times, together=together) if heals else None
        self._exchange = exchange
        self._objection = context.follower.objection(plan) if context.follower is not None else None
        self.answered = plan
        self._begins_to_follow = self._objection is None and self._can_follow(plan)
        if plan.destinations or not plan.followers:  # else a follower may still have to begin to read its base
            context.transport.disallow_checkpoint()  # readers of the last step's state are done, or too late
        if exchange is not None and exchange.hands_out and context.follower is not None and not self.heals_first:
            context.follower.hands_out(plan)
        if plan.source is not None and self.allow_heal:
            context.heals.source = plan.members[plan.source].replica_id
            if not self._begins_to_follow and self._objection is None:
                context.link.healing(Healing(0, 0, 0.0, plan.max_step, context.heals.source))

    def _can_follow(self, plan: QuorumPlan) -> bool:
        follower = self._context.follower
        heals = self.heals_at_end(plan) and not plan.finishing
        return heals and follower is not None and follower.can_begin(plan)

    # ---- the answer

    def wait(self, *, may_resume: bool = False) -> QuorumPlan:
        """Wait for the quorum and its process group. Return its plan.

        If the job is closed and a relay has its final state, the plan loads that.

        Args:
            may_resume: whether this group may have a later state at a relay than the one with which it asked.

        Raises:
            RuntimeError: none was requested.
            StartRefused: the job does not begin at the state of this group, which ``may_resume``.
            SystemExit: training ends in this process.
            JobClosed: all groups have finished, and this one holds the final state.
            TimeoutError, KeepstepError: the reason why no quorum formed.
        """
        context = self._context
        if self.plan is None:
            self.plan = plan = self._answer(may_resume=may_resume)
            if self._skips:
                context.tear(plan.max_step)
            mode, least = context.world_size_mode, context.min_replica_size
            self.participation = plan.participation(mode, least, healed_before=self.heals_first)
            if self.plan.diverged and not is_diverged(context.progress.lineage):
                context.diverge()
                self._name_other_values(self.plan)
        torn = context.progress.torn or self.plan.torn  # a group is torn if one of its ranks is
        if torn and not (self.plan.heal and self.allow_heal):
            context.end_with(KeepstepError(NO_SOURCE_FOR_TORN_STATE))
        return self.plan

    def _answer(self, *, may_resume: bool) -> QuorumPlan:
        context = self._context
        if self._changes is not None:
            raise self._changes
        asking = (
            2 * self._seconds * (1 + context.settings.quorum_retries)
        )  # first for the group's other ranks, then for other groups
        try:
            return self._result(asking + context.timeout.total_seconds() + CALL_MARGIN_SECONDS)
        except CollectivesMismatch as error:
            context.raise_fatal()
            context.end_group(CollectivesExit(str(error)))
        except ReplicasDiverged as error:
            context.end_with(DivergedExit(str(error)))
        except JobClosed as error:
            if error.finished:
                raise
            if context.durable is None:
                context.end_with(JobClosedExit(str(error)))
            context.durable.find_final(error)
            return plan_of_closed_job(error.step, error.lineage)
        except (Leaving, DisagreeError, LayoutMismatch, StartRefused, Banned) as error:  # Banned is a SessionClosed
            if may_resume and isinstance(error, StartRefused):
                raise
            self._end_training(error)
        except SessionClosed:
            context.raise_fatal()
            raise

    def _result(self, limit: float) -> QuorumPlan:
        if self._request is None:
            raise RuntimeError("no quorum was requested for this step; call begin() first")
        request, times = self._request, self._times
        if request.done():
            return request.result()
        began = time.monotonic()
        try:
            return request.result(REPORT_WAIT_SECONDS)
        except TimeoutError:
            if not request.done():
                self._context.telemetry.state("standby" if self._context.asks.stands_by else "waiting_quorum")
            return request.result(limit)
        finally:
            waited = time.monotonic() - began
            if self._context.asks.stands_by:
                times.began += waited  # the first step of a spare begins after its wait
            else:
                times.quorum_seconds += waited

    def _end_training(self, error: Leaving | DisagreeError | LayoutMismatch | StartRefused | Banned) -> NoReturn:
        context = self._context
        if isinstance(error, Leaving):
            if leave_cause(str(error)) == "stopped" and not context.asks.leaving:
                context.end_with(GroupFailedExit("another rank of this group was stopped"))  # this one may start again
            context.end_with(Drained(str(error)))
        if isinstance(error, Banned):
            context.end_with(EvictedExit(str(error)))
        if isinstance(error, StartRefused):
            context.end_with(StartRefusedExit(str(error)))
        if isinstance(error, DisagreeError):
            context.ranks.fail_group(str(error))
            context.end_with(GroupFailedExit(str(error)))
        if isinstance(error, MachineDiffers):
            context.end_with(PreflightExit(str(error)))
        if not error.peer_address:
            context.end_with(MismatchExit(str(error)))
        lines, difference, changed = context.compared.difference_from(error.peer_address)
        refused, behind = f"{error}; {difference}", context.progress.torn or error.peer_step > context.progress.step
        self._changes = context.compared.changes_to(lines, error.peer_step, refused, behind=behind, changed=changed)
        if isinstance(self._changes, PartsMissing):
            context.tear(error.peer_step)
        if self._changes is not None:
            raise self._changes
        time.sleep(MISMATCH_LINGER_SECONDS)  # the other group may read the parameters now; nothing tells when it has
        remedy = HOW_TO_COMPLETE if context.compared.layout.missing(lines) else ""
        context.end_with(MismatchExit(f"{refused}{remedy}"))

    def _name_other_values(self, plan: QuorumPlan) -> None:
        """Log in what the optimizers of this group differ from those of the group that it heals from, if they do."""
        context = self._context
        if context.asks.last_step is not None and context.asks.last_step.values and plan.source is not None:
            difference = context.compared.values_difference_from(plan.members[plan.source].info.address)
            if difference:
                context.log.error("optimizers stepped with other values", reason=difference, remedy=HOW_TO_AGREE)

    def heals_at_end(self, plan: QuorumPlan) -> bool:
        """Return whether this group is behind, and heals at the end of the step."""
        return plan.heal and self.allow_heal and not self.heals_first and not self._begins_to_follow

    def heal_instead(self, reason: str) -> None:
        """Let this group heal at the end of the step, if it was about to follow the others."""
        if self._begins_to_follow:
            self._begins_to_follow = False
            self._context.log.info("heals instead of catching up", reason=reason)

    # ---- live state

    def exchange_state(self) -> Exception | None:
        """Hand out live state, or heal. Return the error that broke this group's heal."""
        if self._exchange is None or self._begins_to_follow or self._objection is not None:
            return None
        return self._exchange.run()

    def refuse_joiners(self, reason: str) -> None:
        """Tell the groups that heal from this one that its state does not come in this step."""
        if self._exchange is not None:
            self._exchange.refuse(reason)

    def begin_to_follow(self, plan: QuorumPlan) -> None:
        """Begin to catch up, if this group follows the others from this step on, which commits."""
        follower = self._context.follower
        if self._begins_to_follow and self._exchange is not None and follower is not None:
            follower.begin(plan, self._exchange.parties())

    @property
    def heal_seconds(self) -> float:
        """Time that a heal of this quorum may take; 0 without a limit."""
        plan = self.answered
        return 0.0 if plan is None else heal_seconds(self._context, plan) or 0.0

    @property
    def healed(self) -> bool:
        """Whether this group has taken over the reference state."""
        return self._exchange is not None and self._exchange.healed

    # ---- before the forward pass

    def resume_without_live_state(self, ask: RankAsk) -> None:
        """Load a durable checkpoint, and ask again, if the groups with a live state are gone since this one connected.

        All members find out from the quorum, or because the job does not begin at their state. If only some of them can
        load one, the others heal from them.
        """
        durable = self._context.durable
        if durable is None or not durable.may_resume:
            return
        plan: QuorumPlan | None = None
        refused = ""
        try:
            plan = self.wait(may_resume=True)
        except StartRefused as error:
            refused = str(error)
        if durable.resume_in_quorum(plan):
            self.refuse_joiners("this group resumed from a durable checkpoint")
            self._request_again(ask, 0)
        elif refused:
            self._context.end_with(StartRefusedExit(refused))

    def heal(self, ask: RankAsk) -> None:
        """In a synchronous or first step: exchange live state and ask again, until no member of the quorum heals."""
        failed: list[Exception] = []
        for tried in range(MAX_HEAL_ROUNDS if self._rules.sync or self._rules.first_step else 0):
            plan = self.wait()
            if self._skips or not (self.heals_first and self.allow_heal and plan.healing):
                return
            if (error := self.exchange_state()) is not None:
                self._context.log.warning("heal failed", step=plan.max_step, tried=tried + 1, reason=str(error))
                self._context.check_heal(error)
                failed.append(error)
            if plan.finishing or isinstance(error, StatesMissing):  # the script may register them before the next step
                if failed:
                    self._errors.report(failed[-1], cause=UNKNOWN)
                return
            if tried + 1 < MAX_HEAL_ROUNDS:
                self._request_again(ask, len(failed))
            else:
                others = KeepstepError(f"in {MAX_HEAL_ROUNDS} quorums in a row a group had to heal before the step")
                self._errors.forget()
                self._errors.report(failed[-1] if failed else others, cause=UNKNOWN)

    def _request_again(self, ask: RankAsk, failed_heals: int) -> None:
        """Request another quorum for the same step, after live state was exchanged."""
        again = self._context.asks.after_exchange(ask, failed_heals, self.heal_seconds)
        self._errors.forget()
        self.request(again)
