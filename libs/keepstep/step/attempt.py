"""One attempt at one step, from ``start_quorum`` to ``should_commit``::

    request     request the quorum, and train on until it has formed
    begin       request the quorum; in a synchronous or first step, heal before the forward pass
    wait_plan   wait for the quorum and its process group
    allreduce   start a collective
    conclude    wait for the collectives, exchange live state, vote, commit or discard
    retry       request a quorum of the same step, and start the same collectives again (``retry_allreduce``)
    after       what the script reduces between this attempt and the next

``quorum_plan`` decides what the group does. ``quorum_request``, ``collectives`` and ``healing`` have the waits, each
with a deadline. An error that spoils the step is kept in ``Attempt.error``: the step does not commit, and training
goes on. An error that ends the process is raised, and kept in ``StepContext.fatal``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
from torch.distributed import Work

from keepstep.collectives.codecs.codec import Round
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.step import another_try
from keepstep.step.after_step import AfterStep
from keepstep.step.agreeing import decision_on, root_of
from keepstep.step.collectives import Collectives
from keepstep.step.context import StepContext
from keepstep.step.healing import StateExchange
from keepstep.step.managed_work import ManagedWork
from keepstep.step.quorum_request import QuorumRequest
from keepstep.step.reduction import Reduction
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.retrying.kept_reductions import KeptReduction
from keepstep.step.retrying.retry_rules import FailedTry
from keepstep.step.step_end import StepEnd
from keepstep_mesh.errors import KeepstepError, SessionClosed
from keepstep_mesh.protocol.group_messages import RankAsk, RankVote
from keepstep_mesh.protocol.lineage import is_diverged
from keepstep_mesh.protocol.membership import Lineage, StepReport
from keepstep_mesh.protocol.messages import Healing

MAX_HEAL_ROUNDS = 5
"""Quorums in a row in which groups heal before the step; after these the step fails, so that an operator sees it."""
NO_SOURCE_FOR_TORN_STATE = (
    "a failed heal or optimizer step left this group's state half written, and this step cannot repair it: the quorum "
    "has no healthy group to heal from, or healing is not allowed. Restart the group from its last checkpoint"
)
NOT_CONTINUED = (
    "a batch was drawn for the groups of this step, and start_quorum (Optimizer.zero_grad) cannot continue it: a group "
    "was lost, something was reduced already, or the arguments are others; call it with arguments before the draw"
)

_numbers = itertools.count(1)


class Attempt:
    """One attempt. ``begin`` requests its quorum.

    Args:
        context: of this process.
        allow_heal: False: a group that is behind takes part as it is. This holds for every group of the quorum when
            one of its members asks for it; from the answer on, ``allow_heal`` is what holds.
        sync: groups heal before the forward pass, and take part. The step begins with the quorum after that.
        first_step: the same, if no group of the job has committed a step.
        timeout: of the quorum, in seconds.
        arguments: those of ``start_quorum``; a call with the same arguments may continue this attempt.
    """

    def __init__(
        self,
        context: StepContext,
        *,
        allow_heal: bool,
        sync: bool,
        first_step: bool,
        timeout: float,
        arguments: tuple[object, ...] = (),
    ) -> None:
        self.number = next(_numbers)
        """Of this attempt in the process."""
        self.arguments = arguments
        self.allow_heal = allow_heal
        self.timeout = timeout
        self.error: Exception | None = None
        self.answered: QuorumPlan | None = None
        """Set on the mesh thread, as soon as the quorum has formed."""
        self.plan: QuorumPlan | None = None
        """Set on the training thread, after it has waited for the quorum and its process group."""
        self.after: AfterStep | None = None
        """Set at the end of the attempt."""
        self.requested_early = False
        """Whether ``request`` was called and ``begin`` was not."""
        self.kept = False
        """Whether only ``should_commit`` ends this attempt, because the script has a batch for its groups."""
        self.synchronized = False
        """Whether the script says that this step makes the states of all groups that take part equal."""
        self.retries = 0
        """Number of retries of this step."""
        self._context = context
        self._limit = timeout
        self._may_heal = allow_heal
        self._own_error = False
        """Whether an error was reported that did not come from the other groups."""
        self._sync = sync
        self._first_step = first_step
        self._heals_first = sync
        """Whether every heal of this quorum ends before the forward pass; known with the answer."""
        self._times = StepTimes(time.monotonic())
        self._request: QuorumRequest | None = None
        self._collectives = Collectives(context, self._times, self._report_of_peers)
        self._exchange: StateExchange | None = None
        """Set with ``answered``."""
        self._begins_to_follow = False
        """Whether this group follows the others instead of healing; known with the answer."""
        self._nonfinite = False
        """Whether this group contributed a NaN or an infinity; known in ``conclude``."""
        self.may_overflow = False
        """Whether an infinity is no mistake: a GradScaler multiplied the gradients."""
        self._began_at: tuple[int, Lineage] | None = None
        """Step and lineage of this group when ``begin`` returned."""
        if context.kept is not None:
            context.kept.begin()

    # ---- the quorum

    def request(self, ask: RankAsk) -> None:
        """Request the quorum and return. The group may train until it calls ``begin``."""
        self.requested_early = True
        self._send(ask)

    def begin(self, ask: RankAsk) -> None:
        """Request the quorum, unless ``request`` has. Wait for it and heal, if that comes before the forward pass.

        When this raises and ``quorum_failed`` is true, it may be called again.
        """
        if not self.requested_early:
            self._send(ask)
        self.requested_early = False
        self._resume_without_live_state(ask)
        self._heal_before_step(ask)
        self._began_at = (self._context.progress.step, self._context.progress.lineage)

    def _send(self, ask: RankAsk) -> None:
        follower = self._context.follower
        self._context.source = follower.source if follower is not None else ""
        self._request = QuorumRequest(self._context, self._follow_quorum(ask), self.timeout)

    async def _follow_quorum(self, ask: RankAsk) -> QuorumPlan:
        """Get the quorum and rebuild the process group for it. On the mesh thread."""
        context = self._context
        plan = await context.link.ask(ask)
        context.root = None
        if plan.quorum.went_back_from:
            lost = plan.quorum.went_back_from - plan.max_step
            context.log.warning(
                "the job went back", from_step=plan.quorum.went_back_from, to_step=plan.max_step, lost_steps=lost
            )
        self.allow_heal = self.allow_heal and plan.allow_heal
        self._heals_first = self._sync or not self.allow_heal or (self._first_step and plan.first_step)
        self._exchange = StateExchange(
            context,
            plan,
            self._times,
            allow_heal=self.allow_heal,
            together=self._heals_first or plan.finishing,
        )
        self.answered = plan
        self._begins_to_follow = self._can_follow(plan)
        if plan.destinations or not plan.followers:  # else a follower may still have to begin to read its base
            context.transport.disallow_checkpoint()  # readers of the last step's state are done, or too late
        if plan.source is not None and self.allow_heal:
            context.source = plan.members[plan.source].replica_id
            if not self._begins_to_follow:
                context.link.healing(Healing(0, 0, 0.0, plan.max_step, context.source))
        try:
            built = await context.reconfigurer.follow(plan)
            context.steps.quorum(context.progress.step, plan, built=built)
        except Exception as error:  # noqa: BLE001  any error of the process group fails the step
            self._report_of_peers(error)
        if context.follower is not None and (objection := context.follower.objection(plan)) is not None:
            self.report(objection)  # before any collective, so that no other group commits the step
        return plan

    def _resume_without_live_state(self, ask: RankAsk) -> None:
        """Load a durable checkpoint, and ask again, if the groups with a live state are gone since this one connected.

        All members find out from the quorum. If only some of them can load one, the others heal from them.
        """
        context = self._context
        if context.resume is None:
            return
        plan = self.wait_plan()
        resume, context.resume = context.resume, None
        if plan.first_step and resume():
            self.refuse_joiners("this group resumed from a durable checkpoint")
            self._ask_again(ask, 0)

    def _heal_before_step(self, ask: RankAsk) -> None:
        """In a synchronous or first step: exchange live state and ask again, until no member of the quorum heals."""
        failed: list[Exception] = []
        for tried in range(MAX_HEAL_ROUNDS if self._sync or self._first_step else 0):
            plan = self.wait_plan()
            if not (self._heals_first and self.allow_heal and plan.healing):
                return
            if (error := self._exchange_state()) is not None:
                self._context.log.warning("heal failed", step=plan.max_step, tried=tried + 1, reason=str(error))
                self._context.check_heal(error)
                failed.append(error)
            if plan.finishing:
                if failed:
                    self.report(failed[-1])
                return
            if tried + 1 < MAX_HEAL_ROUNDS:
                self._ask_again(ask, len(failed))
            else:
                others = KeepstepError(f"in {MAX_HEAL_ROUNDS} quorums in a row a group had to heal before the step")
                self.error = None
                self.report(failed[-1] if failed else others)

    def _ask_again(self, ask: RankAsk, failed_heals: int) -> None:
        """Request another quorum for the same step, after live state was exchanged.

        The lighthouse waits up to ``heal_timeout`` for groups that still heal; a collective would wait for them up to
        its own timeout. All groups, and all ranks of a group, ask again, because they decide it from the quorum.
        """
        context, progress = self._context, self._context.progress
        self.timeout = ask.timeout_ms / 1000 + self._heal_seconds()
        again = replace(
            ask,
            step=progress.step,
            lineage=progress.lineage,
            batches_committed=progress.batches_committed,
            commit_failures=max(failed_heals, 1 if context.reconfigurer.broken else 0),
            timeout_ms=round(self.timeout * 1000),
            root=None,
            leaving=context.leaving,
        )
        self.error = self.plan = self.answered = self._exchange = None
        self._send(again)

    def wait_plan(self) -> QuorumPlan:
        """Wait for the quorum and return the plan of this step. See ``QuorumRequest.wait`` for errors."""
        context = self._context
        if self.plan is None:
            if self._request is None:
                raise RuntimeError("no quorum was requested for this step; call begin() first")
            self.plan = self._request.wait(self._times)
            if self.plan.diverged and not is_diverged(context.progress.lineage):
                context.diverge()
        torn = context.progress.torn or self.plan.torn  # a group is torn if one of its ranks is
        if torn and not (self.plan.heal and self.allow_heal):
            context.end_with(KeepstepError(NO_SOURCE_FOR_TORN_STATE))
        return self.plan

    @property
    def done(self) -> bool:
        """Whether the step has been committed or discarded."""
        return self.after is not None

    @property
    def quorum_formed(self) -> bool:
        """Whether the quorum has formed, and its process group is built or has failed."""
        return self._request is not None and self._request.done and not self._request.failed

    @property
    def quorum_failed(self) -> bool:
        """Whether the request has ended without a quorum."""
        return self._request is not None and self._request.failed

    def goes_on(self, arguments: tuple[object, ...]) -> bool:
        """Return whether another ``start_quorum`` leaves this attempt open.

        A kept attempt stays open in any case. If it cannot be continued, it will not commit.
        """
        if self.arguments == arguments and self.is_untouched():
            return True
        if self.kept:
            self.report(KeepstepError(NOT_CONTINUED))
        return self.kept

    def is_untouched(self) -> bool:
        """Return whether another ``start_quorum`` may continue this attempt.

        It may while the quorum is pending, or complete with all its members alive, nothing was reduced or went wrong,
        and the group is still in the state in which ``begin`` left it.
        """
        context, request = self._context, self._request
        if self.done or self.error is not None or self._collectives.started or request is None or request.failed:
            return False
        if self.synchronized or (context.progress.step, context.progress.lineage) != self._began_at:
            return False
        return not (request.done and context.reconfigurer.broken)

    @property
    def collectives(self) -> int:
        """Number of collectives that were started."""
        return self._collectives.started

    def cancel(self) -> None:
        """End an attempt in which nothing was reduced and nothing failed, without a vote."""
        if self.plan is not None and self.error is None and not self.done and not self._collectives.started:
            self.refuse_joiners("this group cancelled the step")
            self.after = AfterStep(self._context, self.participation(self.plan))
            self._context.link.finished_step()

    def withdraw(self) -> None:
        """End an attempt that ``begin`` was not called for. If its quorum has formed, its members learn it."""
        reason = "this group left its training loop before the step began"
        if self._request is not None:
            self._request.withdraw()
        if self.answered is not None:
            self.refuse_joiners(reason)
            self.report(KeepstepError(reason))
        self.after = AfterStep(self._context, (None, 0), self.error)
        self._context.link.finished_step()

    def is_in_flight(self) -> bool:
        """Return whether peers may wait for this group's part in the step. A request without an answer is withdrawn."""
        if not self.done and self.answered is None and self._request is not None:
            self._request.withdraw()
        return not self.done and self.answered is not None

    def participation(self, plan: QuorumPlan) -> tuple[int | None, int]:
        """Return this group's number among those that take part (None: it does not), and their number."""
        context = self._context
        return plan.participation(context.world_size_mode, context.min_replica_size, healed_before=self._heals_first)

    def heals_at_end(self, plan: QuorumPlan) -> bool:
        """Return whether this group is behind, and heals in ``conclude``."""
        return plan.heal and self.allow_heal and not self._heals_first and not self._begins_to_follow

    def _can_follow(self, plan: QuorumPlan) -> bool:
        follower = self._context.follower
        heals = self.heals_at_end(plan) and not plan.finishing
        return heals and follower is not None and follower.can_begin(plan)

    def report(self, error: Exception) -> None:
        """Keep this step from committing, and abort the process group. Does nothing after the end of the step."""
        self._own_error = True
        self._report_of_peers(error)

    def _report_of_peers(self, error: Exception) -> None:
        """Report an error that came from the other groups, or from the connections to them."""
        context = self._context
        if not self.done and self.error is None:
            self.error = error
            reason = f"{type(error).__name__}: {error}"
            context.log.warning("step will not commit", step=context.progress.step, reason=reason)
            context.reconfigurer.abort(f"this group reported {reason}")

    # ---- collectives and live state

    def allreduce(self, reduction: Reduction) -> ManagedWork:
        """Reduce a tensor in place over the groups that take part. Errors are reported, not raised.

        See ``Collectives.allreduce``.
        """
        kept = self._context.kept
        return self._allreduce(reduction, None if kept is None else kept.note(reduction))

    def _allreduce(self, reduction: Reduction, kept: KeptReduction | None) -> ManagedWork:
        def start(contributes: bool, world: int) -> ManagedWork:
            return self._collectives.allreduce(reduction, contributes=contributes, world=world, kept=kept)

        return self._start_collective(start, reduction.tensor)

    def run_collective(self, tensors: list[torch.Tensor], start: Callable[[Round], Work]) -> ManagedWork:
        """Average ``tensors`` in place with ``start``. Errors are reported, not raised. See ``Collectives.run``."""
        if self._context.kept is not None:
            self._context.kept.refuse("a codec averaged tensors, and keeps an error of its own")
        return self._start_collective(
            lambda contributes, world: self._collectives.run(tensors, start, contributes=contributes, world=world),
            tensors,
        )

    def _start_collective(self, start: Callable[[bool, int], ManagedWork], value: object) -> ManagedWork:
        """Call ``start`` with whether this group contributes, and the number of groups that do."""
        try:
            plan = self.wait_plan() if self.error is None else None
            if plan is None or self.error is not None or plan.finishing:
                return ManagedWork(None, value, ok=False)
            rank, world = self.participation(plan)
            return start(rank is not None, world)
        except SystemExit as error:  # should_commit raises it again: a backward pass must not be left by an exit
            self.report(KeepstepError(f"leaving: {error}"))
        except Exception as error:  # noqa: BLE001  reported: the step does not commit, training goes on
            self._report_of_peers(error)
        return ManagedWork(None, value, ok=False)

    def _exchange_state(self) -> Exception | None:
        if self._exchange is None or self._begins_to_follow:
            return None
        return self._exchange.run()

    def refuse_joiners(self, reason: str) -> None:
        """Tell the groups that heal from this one that its state does not come in this step."""
        if self._exchange is not None:
            self._exchange.refuse(reason)

    def _heal_seconds(self) -> float:
        return (self._exchange.limit if self._exchange is not None else None) or 0.0

    # ---- the end

    def conclude(self, limit: timedelta) -> bool:
        """Wait for the collectives, exchange live state, vote within ``limit``. Return whether the step commits."""
        context = self._context
        committed, unhealed = self._take(limit)
        with self._times.retrying():
            while not (committed or self.done) and self._goes_again():
                self._retry()
                committed, unhealed = self._take(limit)
        if self.done:  # groups finish in this quorum
            return False
        self._settle(self.plan, committed=committed)
        if unhealed is not None:
            context.check_heal(unhealed)
        return committed

    def _take(self, limit: timedelta) -> tuple[bool, Exception | None]:
        """Take the step under its present quorum. Return whether it commits, and the error of this group's heal."""
        context = self._context
        plan: QuorumPlan | None = None
        unhealed: Exception | None = None
        try:
            plan = self.wait_plan()
        except SessionClosed:
            raise
        except Exception as error:  # noqa: BLE001  reported, unless it ends the process
            context.raise_fatal()
            self.report(error)  # without a quorum, every rank of the group gets the same error
        if plan is not None and context.follower is not None:
            context.follower.check(plan)
        if plan is not None and plan.finishing:
            self.end_finishing()
            return False, None
        committed = False
        if plan is not None:
            self._finish_collectives()
            self._check_finite(plan)
            if (unhealed := self._exchange_state()) is not None:
                self.report(unhealed)
            root = root_of(context, plan)
            if self.error is None:  # else BatchNorm's buffers may be averaged in some groups and not in others
                context.root = root
            committed = self._vote(plan, limit)
        return committed, unhealed

    # ---- the same step again

    def _goes_again(self) -> bool:
        """Return whether all ranks of this group take the step that failed again."""
        plan = self.plan
        if plan is None or self._context.kept is None:
            return False
        own = self._own_error or self._collectives.write_back_failed
        ending = self._context.fatal is not None
        failed = FailedTry(self.retries, own, plan.behind, ending, self._context.kept.obstacle())
        return another_try.is_wanted(self._context, plan, failed)

    def _retry(self) -> None:
        """Request a quorum of the same step, and start its all-reduces again with the gradients of this group."""
        context = self._context
        if self.plan is not None:
            self._report_to_lighthouse(self.plan, committed=False)
            another_try.write(context, self.plan, str(self.error))
        context.link.finished_step()
        self.retries += 1
        self.timeout, self.allow_heal, self._own_error = self._limit, self._may_heal, False
        self._collectives = Collectives(context, StepTimes(self._times.began), self._report_of_peers)
        ask = another_try.ask(context, self._limit, allow_heal=self._may_heal)
        self.error = self.plan = self.answered = self._exchange = None
        self._send(ask)
        try:
            self._heal_before_step(ask)
            plan = self.wait_plan()
        except SessionClosed:
            raise
        except Exception as error:  # noqa: BLE001  reported, unless it ends the process
            context.raise_fatal()
            self.report(error)
            return
        if plan.behind:
            self.report(KeepstepError(another_try.TOO_LATE))
        for kept in context.kept.again() if context.kept is not None and not plan.finishing else ():
            kept.restore()
            self._allreduce(kept.reduction, kept)

    def end_finishing(self) -> None:
        """End a quorum in which groups finish: heal, if this group is behind. No step is committed or discarded.

        All ranks of the group do the same, so they do not vote.
        """
        context, plan = self._context, self.wait_plan()
        unhealed = self._exchange_state()
        if unhealed is not None:
            self.report(unhealed)
        self.after = AfterStep(context, (None, 0), self.error)
        context.link.finished_step()
        context.last_attempt = plan.attempt
        if self.error is not None:
            context.progress.discard()
        if unhealed is not None:
            context.check_heal(unhealed)

    def abandon(self) -> None:
        """End a step that never came to ``should_commit``, after an exception for example.

        Other groups, and the other ranks of this one, learn that this rank's part does not come.
        """
        plan = None
        try:
            plan = self.wait_plan()
        except Exception as error:  # noqa: BLE001  reported, unless it ends the process
            self._context.raise_fatal()
            self.report(error)  # without a quorum, no other group waits for this one
        reason = "this group began another step instead of ending this one with should_commit()"
        self.report(KeepstepError(reason))
        self.refuse_joiners(reason)
        self._collectives.drain()
        if plan is not None:
            self._vote(plan, self._context.timeout)
            if self._context.kept is not None:
                self._goes_again()  # no; the other ranks poll this one
        self._settle(plan, committed=False)

    def _finish_collectives(self) -> None:
        self._collectives.finish(all_or_none=self._context.kept is not None)
        if self.error is None:
            self._collectives.check_process_group()
        self._collectives.synchronize_device()

    def _check_finite(self, plan: QuorumPlan) -> None:
        """Note whether this group contributed a NaN or an infinity. Refuse a result with one, if the job does."""
        context, own = self._context, self._collectives.contributed_nonfinite and not self.may_overflow
        before = context.last_step is not None and context.last_step.nonfinite
        self._nonfinite = own
        if own and not before:  # else every step of a model that is NaN would log it
            context.log.warning("this group contributed a NaN or an infinity", step=plan.max_step)
        if self.error is None and self._collectives.received_nonfinite:
            who = "this group" if own else "another group, which the event nonfinite of the job names,"
            self._vote_no(KeepstepError(f"the average has a NaN or an infinity: {who} contributed it"))

    def _vote_no(self, error: Exception) -> None:
        """Keep this step from committing. The process group stays, because every group votes no for this reason."""
        self.error, self._own_error = error, True
        self._context.log.warning("step will not commit", step=self._context.progress.step, reason=str(error))

    def _vote(self, plan: QuorumPlan, limit: timedelta) -> bool:
        """Return the group's decision."""
        context = self._context
        participants = self.participation(plan)[1]
        if self.error is None and participants < context.min_replica_size:
            few = f"{participants} groups take part, min_replica_size is {context.min_replica_size}"
            self._vote_no(KeepstepError(few))
        ok = self.error is None
        if context.settings.world_size == 1:
            return ok
        vote = RankVote(plan.epoch, plan.quorum_id, plan.max_step, plan.attempt, ok)
        # the other ranks may still wait for a collective and a heal; rank 0 notices at once when one of them dies
        seconds = limit.total_seconds() + 3 * context.timeout.total_seconds()
        committed = decision_on(context, vote, seconds + (self._heal_seconds() if plan.heal else 0.0))
        if ok and not committed:
            self.error = KeepstepError("another rank of this group voted no")
        return committed

    def _report_to_lighthouse(self, plan: QuorumPlan, *, committed: bool) -> None:
        """Report this try of the step with the next request."""
        self._context.last_attempt = plan.attempt
        self._context.last_step = StepReport(
            *(plan.quorum_id, plan.max_step, committed, self._collectives.started, self._nonfinite),
            quantized=self._collectives.quantized,
        )

    def _settle(self, plan: QuorumPlan | None, *, committed: bool) -> None:
        """Count the step as committed or discarded, and log it."""
        context, participation = self._context, self.participation(plan) if plan is not None else (None, 0)
        self.after = AfterStep(context, participation, self.error)
        context.link.finished_step()
        if plan is not None:
            self._report_to_lighthouse(plan, committed=committed)
        end = StepEnd(context, self._times, plan, participation[1], nonfinite=self._nonfinite, retries=self.retries)
        if committed and plan is not None:
            if self._begins_to_follow and self._exchange is not None and context.follower is not None:
                context.follower.begin(plan, self._exchange.parties())
            behind = plan.behind and not (self._exchange is not None and self._exchange.healed)
            end.commit(plan, behind=behind, synchronized=self.synchronized)
            if context.progress.following and context.follower is not None:
                context.follower.followed(plan, participation[1], self._collectives.finish)
        else:
            end.discard(str(self.error))
