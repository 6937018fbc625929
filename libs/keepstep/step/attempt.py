"""One attempt at one step, from ``start_quorum`` to ``should_commit``::

    request     request the quorum, and train on until it has formed
    begin       request the quorum; in a synchronous or first step, heal before the forward pass
    wait_plan   wait for the quorum and its process group
    allreduce   start a collective
    conclude    wait for the collectives, exchange live state, vote, commit or discard
    after       what the script reduces between this attempt and the next

``quorum_plan`` decides what the group does. ``step_quorum``, ``reducing/`` and ``healing`` have the waits, each with a
deadline. With ``retry_allreduce`` a step may be tried again (``retries``). An error that spoils the step is kept in
``first_error``: the step does not commit, and training goes on. An error that ends the process is raised, and kept in
``StepContext.fatal``.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Work

from keepstep.collectives.codecs.codec import Round
from keepstep.group.agreement import PartsMissing
from keepstep.group.quorum_plan import Participation, QuorumPlan
from keepstep.step.context import StepContext
from keepstep.step.evidence.repeated_error import OwnError
from keepstep.step.first_error import FirstError
from keepstep.step.reducing.after_step import AfterStep
from keepstep.step.reducing.collectives import Collectives
from keepstep.step.reduction import ManagedWork, Reduction
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.retries import Retries, Taken
from keepstep.step.step_end import StepEnd
from keepstep.step.step_quorum import HealRules, StepQuorum
from keepstep_mesh.errors import KeepstepError, SessionClosed
from keepstep_mesh.protocol.group_messages import RankAsk, RankVote
from keepstep_mesh.protocol.membership import UNKNOWN, Lineage
from keepstep_mesh.telemetry.tracing.spans import COMMIT

NOT_CONTINUED = (
    "a batch was drawn for the groups of this step, and start_quorum (Optimizer.zero_grad) cannot continue it: a group "
    "was lost, something was reduced already, or the arguments are others; call it with arguments before the draw"
)

_numbers = itertools.count(1)


class Attempt:
    """One attempt. ``begin`` requests its quorum.

    Args:
        context: of this process.
        rules: when groups heal. The step begins with the quorum after heals before the forward pass.
        timeout: of the quorum, in seconds.
        arguments: those of ``start_quorum``; a call with the same arguments may continue this attempt.
        turn: as of ``StepQuorum``.
    """

    def __init__(
        self,
        context: StepContext,
        rules: HealRules,
        *,
        timeout: float,
        arguments: tuple[object, ...] = (),
        turn: str = "",
    ) -> None:
        self.number = next(_numbers)
        """Of this attempt in the process."""
        self.arguments = arguments
        self.after: AfterStep | None = None
        """Set at the end of the attempt."""
        self.requested_early = False
        """Whether ``request`` was called and ``begin`` was not."""
        self.kept = False
        """Whether only ``should_commit`` ends this attempt, because the script has a batch for its groups."""
        self.continued = False
        """Whether ``start_quorum`` was called since then."""
        self.synchronized = False
        """Whether the script says that this step makes the states of all groups that take part equal."""
        self.may_overflow = False
        """Whether an infinity is no mistake: a GradScaler multiplied the gradients."""
        self.cannot_follow = ""
        """Why the script could not replay this step, so that a group that is behind heals; empty: it may follow."""
        self.committed: bool | None = None
        """Whether the step counts, once ``conclude`` has decided it."""
        self._context = context
        self._rules = rules
        self._timeout = timeout
        self._times = StepTimes(time.monotonic(), trace=context.telemetry.new_trace())
        self._first_error = FirstError(context)
        self._quorum = StepQuorum(context, rules, self._times, self._first_error, turn)
        self.present = self._new_collectives(self._times)
        """Collectives of the present try."""
        self._retries: Retries | None = None
        """None: the step is not tried again."""
        if context.kept is not None:
            self._retries = Retries(context, context.kept, self._quorum, self._first_error, self._times, self)
        self._began_at: tuple[int, Lineage] | None = None
        """Step and lineage of this group when ``begin`` returned."""

    # ---- the quorum

    def request(self, ask: RankAsk) -> None:
        """Request the quorum and return. The group may train until it calls ``begin``."""
        self.requested_early = True
        self._quorum.request(ask)

    def begin(self, ask: RankAsk) -> None:
        """Request the quorum, unless ``request`` has. Wait for it and heal, if that comes before the forward pass.

        When this raises and ``quorum_failed`` is true, it may be called again.
        """
        if not self.requested_early:
            self._quorum.request(ask)
        self.requested_early = False
        self._quorum.resume_without_live_state(ask)
        self._quorum.heal(ask)
        self._began_at = (self._context.progress.step, self._context.progress.lineage)

    def wait_plan(self) -> QuorumPlan:
        """Wait for the quorum and return the plan of this step. See ``StepQuorum.wait`` for errors."""
        return self._quorum.wait()

    @property
    def plan(self) -> QuorumPlan | None:
        """The plan of this step, once the training thread has waited for it."""
        return self._quorum.plan

    @property
    def error(self) -> Exception | None:
        """Why this step will not commit, or has not; None: it may commit."""
        return self._first_error.error

    @property
    def own_error(self) -> OwnError | None:
        """``error``, if this group caused it in a quorum."""
        return self._first_error.of_this_group if self.plan is not None else None

    @property
    def done(self) -> bool:
        """Whether the step has been committed or discarded."""
        return self.after is not None

    @property
    def quorum_formed(self) -> bool:
        """Whether the quorum has formed, and its process group is built or has failed."""
        return self._quorum.formed

    @property
    def quorum_failed(self) -> bool:
        """Whether the request has ended without a quorum."""
        return self._quorum.failed

    def goes_on(self, arguments: tuple[object, ...]) -> bool:
        """Return whether another ``start_quorum`` leaves this attempt open.

        A kept attempt stays open in any case. If it cannot be continued, it will not commit.
        """
        self.continued = self.kept
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
        context, quorum = self._context, self._quorum
        if self.done or self.error is not None or self.collectives or not quorum.requested or quorum.failed:
            return False
        if self.synchronized or (context.progress.step, context.progress.lineage) != self._began_at:
            return False
        return not (quorum.formed and context.reconfigurer.broken)

    @property
    def collectives(self) -> int:
        """Number of collectives that were started."""
        return self.present.started

    @property
    def retries(self) -> int:
        """Number of retries so far."""
        return 0 if self._retries is None else self._retries.number

    def cancel(self) -> None:
        """End an attempt in which nothing was reduced and nothing failed, without a vote."""
        if self.plan is not None and self.error is None and not self.done and not self.collectives:
            self.refuse_joiners("this group cancelled the step")
            self._end(self._quorum.participation)
            self._context.telemetry.without_step(self._times)

    def withdraw(self) -> None:
        """End an attempt that ``begin`` was not called for. If its quorum has formed, its members learn it."""
        reason = "this group left its training loop before the step began"
        self._quorum.withdraw()
        if self._quorum.answered is not None:
            self.refuse_joiners(reason)
            self.report(KeepstepError(reason))
        self._end((None, 0))

    def is_in_flight(self) -> bool:
        """Return whether peers may wait for this group's part in the step. A request without an answer is withdrawn."""
        if self.done:
            return False
        if self._quorum.answered is None:
            self._quorum.withdraw()
        return self._quorum.answered is not None

    def participation(self) -> Participation:
        """Wait for the quorum, and return this group's part in the step. A step without a quorum has no groups."""
        if self.plan is None and not self.done:
            with contextlib.suppress(PartsMissing):  # reported, and the script takes the step alone
                self.wait_plan()
        return self._quorum.participation

    def heals_at_end(self) -> bool:
        """Wait for the quorum, and return whether this group is behind, and heals in ``conclude``."""
        try:
            return self._quorum.heals_at_end(self.wait_plan())
        except PartsMissing:  # as in ``participation``
            return False

    def report(self, error: Exception) -> None:
        """Keep this step from committing, and abort the process group. Does nothing after the end of the step.

        Once the process group has failed, errors of the script count as caused by that.
        """
        self._quorum.report(error)

    def refuse_joiners(self, reason: str) -> None:
        """Tell the groups that heal from this one that its state does not come in this step."""
        self._quorum.refuse_joiners(reason)

    # ---- collectives

    def allreduce(self, reduction: Reduction) -> ManagedWork:
        """Reduce a tensor in place over the groups that take part. Errors are reported, not raised.

        See ``Collectives.allreduce``.
        """
        return self.present.allreduce(reduction) if self._retries is None else self._retries.allreduce(reduction)

    def run_collective(self, tensors: list[torch.Tensor], start: Callable[[Round], Work]) -> ManagedWork:
        """Average ``tensors`` in place with ``start``. Errors are reported, not raised. See ``Collectives.run``."""
        if self._context.kept is not None:
            self._context.kept.refuse("a codec averaged tensors, and keeps an error of its own")
        return self.present.run(tensors, start)

    def _new_collectives(self, times: StepTimes) -> Collectives:
        return Collectives(self._context, times, self._first_error, self._wait_participation)

    def _wait_participation(self) -> Participation | None:
        """Return the participation that ``Collectives`` waits for."""
        quorum = self._quorum
        return None if quorum.wait().finishing or self._first_error.error is not None else quorum.participation

    # ---- the end

    def conclude(self, limit: timedelta) -> bool:
        """Wait for the collectives, exchange live state, vote within ``limit``. Return whether the step commits."""
        context = self._context
        committed, unhealed = self.take(limit) if self._retries is None else self._retries.conclude(limit)
        if self.done:  # groups finish in this quorum
            return False
        self._settle(self.plan, committed=committed)
        self.committed = committed
        if unhealed is not None:
            context.check_heal(unhealed)
        return committed

    def take(self, limit: timedelta) -> Taken:
        """Take the step under its present quorum, and vote within ``limit``. ``conclude`` calls this for each try."""
        context, collectives = self._context, self.present
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
            return Taken(committed=False)
        committed = False
        if plan is not None:
            if self.cannot_follow:
                self._quorum.heal_instead(self.cannot_follow)
            self._first_error.abort()  # an error may have been reported while the process group was built
            collectives.end()
            if refused := collectives.check_finite(plan, may_overflow=self.may_overflow):
                self._first_error.vote_no(KeepstepError(refused))
            if (unhealed := self._quorum.exchange_state()) is not None:
                self._first_error.report(unhealed, cause=UNKNOWN)
            root = context.state.root_at(plan.max_step, plan.lineage) if plan.verify and not plan.behind else None
            if self.error is None:  # else BatchNorm's buffers may be averaged in some groups and not in others
                context.asks.root = root
            began = time.monotonic()
            committed = self._vote(plan, limit)
            if self._times.trace is not None:
                self._times.trace.present.phase(COMMIT, began, time.monotonic(), self.error, committed=committed)
        return Taken(committed, unhealed)

    def report_try(self, plan: QuorumPlan, *, committed: bool) -> None:
        """Report the present try to the lighthouse, with the next request."""
        self._context.ranks.ended(plan.attempt)
        self._context.asks.last_step = self.present.report(plan, committed=committed)

    def begin_again(self) -> RankAsk:
        """Begin another try, and return its request."""
        self.present = self._new_collectives(StepTimes(self._times.began, trace=self._times.trace))
        return self._context.asks.retry(self._timeout, allow_heal=self._rules.allow_heal)

    def end_finishing(self) -> None:
        """End a quorum in which groups finish, or of a closed job: heal, if this group is behind. It commits no step.

        All ranks of the group do the same, so they do not vote.
        """
        context, plan = self._context, self.wait_plan()
        if context.durable is not None:
            context.durable.load_final()
        unhealed = self._quorum.exchange_state()
        if unhealed is not None:
            self._first_error.report(unhealed, cause=UNKNOWN)
        self._end((None, 0))
        context.telemetry.without_step(self._times)
        context.ranks.ended(plan.attempt)
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
        self.present.succeeded()
        if plan is not None:
            self._vote(plan, self._context.timeout)
            if self._retries is not None:
                self._retries.goes_again()  # no; the other ranks poll this one
        self._settle(plan, committed=False)

    def _vote(self, plan: QuorumPlan, limit: timedelta) -> bool:
        """Vote on the step of ``plan``, and return the group's decision. Without an error the vote is yes.

        GroupFailedExit: this rank cannot learn the decision.
        """
        context, errors, participants = self._context, self._first_error, self._quorum.participation[1]
        if errors.error is None and participants < context.min_replica_size:
            few = f"{participants} groups take part, min_replica_size is {context.min_replica_size}"
            errors.vote_no(KeepstepError(few))
        ok = errors.error is None
        if context.ranks.alone:
            return ok
        # the other ranks may still wait for a collective and a heal; rank 0 notices at once when one of them dies
        seconds = limit.total_seconds() + 3 * context.timeout.total_seconds()
        seconds += self._quorum.heal_seconds if plan.heal else 0.0
        ballot = RankVote(plan.epoch, plan.quorum_id, plan.max_step, plan.attempt, ok)
        committed = context.ranks.decide(ballot, seconds)
        if ok and not committed:
            errors.outvoted()
        return committed

    def _settle(self, plan: QuorumPlan | None, *, committed: bool) -> None:
        """Count the step as committed or discarded, and log it. From a commit on, signals are held back."""
        if committed:
            self._context.signals.hold()
        context, quorum = self._context, self._quorum
        participation = quorum.participation if plan is not None else (None, 0)
        self._end(participation)
        if plan is not None:
            self.report_try(plan, committed=committed)
        end = StepEnd(context, self._times, plan, participation[1], self.present.nonfinite, self.retries)
        if committed and plan is not None:
            quorum.begin_to_follow(plan)
            end.commit(plan, behind=plan.behind and not quorum.healed, synchronized=self.synchronized)
            if context.progress.following and context.follower is not None:
                context.follower.followed(plan, participation[1], self.present.finish)
        else:
            end.discard(str(self.error))

    def _end(self, participation: Participation) -> None:
        self.after = AfterStep(self._context, participation, self.error)
        self._first_error.end()
        self._context.link.finished_step()
