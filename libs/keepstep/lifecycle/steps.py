"""The steps of one process, one after the other: which attempt is open, how the next one begins, and how one ends.

DDP, optimizers, samplers, LocalSGD and DiLoCo of keepstep reach it as ``Manager.steps``. On the training thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch

from keepstep.group.agreement import FixedLines, LayoutChanges, LayoutPart, PartsMissing
from keepstep.group.turns import NO_TURN, Turns
from keepstep.lifecycle.durability import Durability
from keepstep.lifecycle.joining import Joining
from keepstep.lifecycle.manager_settings import ManagerSettings
from keepstep.lifecycle.membership import GroupMembership
from keepstep.lifecycle.rehearsal.rehearsed_step import RehearsedStep
from keepstep.lifecycle.rehearsal.state_before import StateBefore
from keepstep.process_group import ProcessGroup
from keepstep.runtime.exits import handled_error
from keepstep.runtime.learned_imports import tell_imports
from keepstep.script_checks.script_checker import ScriptChecker
from keepstep.stacks.activity import Progress
from keepstep.step.attempt import Attempt
from keepstep.step.context import StepContext
from keepstep.step.evidence.repeated_error import LIMIT, OwnError, RepeatedError
from keepstep.step.step_quorum import HealRules
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import StepReport
from keepstep_mesh.protocol.records import copier

NOTHING_TO_COMMIT = (
    "should_commit was called again after a step that was discarded: begin the next one with start_quorum "
    "(Optimizer.zero_grad does)"
)

_with_values = copier(StepReport, StepReport, "values")


class Steps:
    """Opens an attempt for each step, and ends it.

    Args:
        settings: of the Manager.
        context: what all attempts share.
        membership: leaves the job between two steps.
        durability: writes a durable checkpoint, or loads one, between two steps.
        checker: warns of mistakes of the script, and compares it with those of other groups.
    """

    def __init__(
        self,
        settings: ManagerSettings,
        context: StepContext,
        membership: GroupMembership,
        durability: Durability,
        checker: ScriptChecker,
    ) -> None:
        self._settings = settings
        self._context = context
        self._membership = membership
        self._durability = durability
        self._checker = checker
        self.attempt: Attempt | None = None
        """The open attempt, or the one that ended last."""
        self.rehearsing = False
        """Whether this process is in ``Manager.rehearse``."""
        self.ended_at: int | None = None
        """Step at which ``Manager.finish`` has ended the training."""
        self.handled = handled_error()
        """Error that the script had handled when its last step began; 0: none."""
        self._repeated = RepeatedError()
        self.joining = Joining(settings, context, checker, lambda: self.open_number is None and not self.rehearsing)
        self._beginner = ""
        """See ``begin_with``; empty: none."""
        self._turns = Turns()
        self._changing = False
        """Whether an optimizer of the script has begun a step, and has not ended it."""
        context.link.activity.progress = self._where

    def _where(self) -> Progress:
        """Return where this rank stands. On the event-loop thread."""
        step, attempt = self._context.progress.step, self.attempt
        if attempt is None or attempt.done:
            return Progress(step)
        return Progress(step, attempt.collectives, attempt.present.in_flight())

    # ---- the open step

    @property
    def open_number(self) -> int | None:
        """Number of the open attempt, counted in this process. None: no step is open.

        A step is open from ``start_quorum`` to ``should_commit`` or ``shutdown``.
        """
        attempt = self.attempt
        if attempt is None or attempt.done or attempt.requested_early or self._membership.ended:
            return None
        return attempt.number

    @property
    def states_loaded(self) -> int:
        """Number of states of other groups, and of durable checkpoints, that this process has loaded."""
        return self._context.state.loads

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the process group reduces."""
        pg = self._context.reconfigurer.pg
        if isinstance(pg, ProcessGroup):
            return pg.device
        types = {one.type for one in pg._device_types}  # noqa: SLF001  torch has no public name for it
        return torch.device("cpu" if not types or "cpu" in types else types.pop())

    @property
    def continued(self) -> bool:
        """Whether ``start_quorum`` was called in the open step after ``keep``."""
        return self.attempt is not None and self.attempt.continued

    @property
    def groups_finish(self) -> bool:
        """Whether groups finish in the quorum of this step, or of the last one: it commits nothing, no step follows."""
        plan = None if self.attempt is None else self.attempt.plan
        return plan is not None and plan.finishing

    def current(self) -> Attempt:
        """Return the open attempt. RuntimeError if no step has begun."""
        if self.attempt is None or self.attempt.done:
            raise RuntimeError("no step has begun: call start_quorum() first (Optimizer.zero_grad() does)")
        return self.attempt

    def participation(self) -> tuple[int | None, int]:
        """Wait for the quorum, and return ``participating_rank`` and ``num_participants``.

        After ``should_commit`` they are of the step that ended. A step that asks for them may be retried, so what
        depends on them must be computed again then.
        """
        return (self.attempt or self.current()).participation()

    def keep(self) -> None:
        """Let only ``should_commit`` end the open step, because a batch was drawn for its groups.

        A ``start_quorum`` that would begin another step leaves this one open, and keeps it from committing.
        """
        if self.attempt is not None:
            self.attempt.kept = True

    def expect_overflow(self) -> None:
        """Declare that a GradScaler multiplied the gradients of this step: an infinity in them is no mistake.

        Then this group is not named for it. ``Optimizer`` calls this for a GradScaler.
        """
        if self.attempt is not None:
            self.attempt.may_overflow = True

    def heal_instead(self, reason: str) -> None:
        """Let this group heal at the end of the open step if it is behind, because it could not replay the step."""
        if self.attempt is not None:
            self.attempt.cannot_follow = reason

    def cancel(self) -> None:
        """End a step that served to heal only: it is neither committed nor discarded.

        Call it in all ranks of the group. In a step in which something was reduced, or has failed, it does nothing.
        """
        if self.attempt is not None:
            self.attempt.cancel()

    # ---- begin

    def begin_with(self, optimizer: str) -> None:
        """Note that an optimizer calls ``start_quorum`` next. Groups compare it when their members have changed.

        Args:
            optimizer: its name, equal in all groups; empty: the script has no other one.
        """
        self._beginner = optimizer

    def start(self, *, allow_heal: bool, shrink_only: bool, timeout: timedelta | None) -> None:
        """Begin a step, or continue the open one: ``Manager.start_quorum``."""
        context = self._context
        beginner, self._beginner = self._beginner, ""
        context.raise_fatal()
        if context.faults is not None:
            context.faults.raise_ordered()
        if self.rehearsing:
            if self.attempt is None or not self.attempt.goes_on(()):
                self.attempt = RehearsedStep(context)
            return
        self._checker.quorum_requested(time.monotonic())
        self.compare_script()
        context.compared.read()
        self.joining.tell()
        limit = (timeout or self._settings.quorum_timeout).total_seconds()
        arguments = (allow_heal, shrink_only, limit, context.compared.digest)
        attempt = self.attempt
        if attempt is None or attempt.done or not attempt.requested_early:
            if attempt is not None and not attempt.done:
                if attempt.goes_on(arguments):
                    return
                attempt.abandon()
                self._end_if_repeated(attempt.own_error)
            turn = self._turns.begin(beginner) if beginner else NO_TURN
            attempt = self.new(arguments, limit, allow_heal=allow_heal, turn=turn)
        while True:
            if context.asks.leaving and context.settings.world_size == 1:
                self._membership.leave(context)
            ask = context.asks.next(limit, allow_heal=allow_heal, shrink_only=shrink_only)
            try:
                attempt.begin(ask)
                if context.asks.stands_by:  # else the forward pass would begin before the group has a place
                    attempt.wait_plan()
                    context.asks.stands_by = False
                break
            except PartsMissing as error:
                attempt.report(error)
                break
            except LayoutChanges as error:
                context.log.info("adopt the parameters of the job", reason=str(error))
                context.compared.read()
            except TimeoutError as error:
                limited = timeout is not None and not context.asks.stands_by
                if limited or ask.leaving or not attempt.quorum_failed:
                    raise
                context.raise_fatal()
                log = context.log.info if context.asks.stands_by else context.log.warning
                log("no quorum yet; asking again", step=context.progress.step, reason=str(error))

    def new(
        self,
        arguments: tuple[object, ...],
        limit: float,
        *,
        allow_heal: bool = True,
        final: bool = False,
        turn: str = NO_TURN,
    ) -> Attempt:
        """End what follows the last step, and open an attempt that is not begun.

        Args:
            arguments: of ``start``; another call with these continues the attempt.
            limit: of a request, seconds.
            allow_heal: as of ``Manager.start_quorum``.
            final: no step follows, because this group finishes.
            turn: of ``turns``.
        """
        context = self._context
        if self.ended_at is not None:
            raise RuntimeError(f"finish() has ended the training at step {self.ended_at}; no step follows it")
        context.reconfigurer.use_current_device()
        if self.attempt is not None and self.attempt.after is not None:
            self.attempt.after.end()
        self.check_change()
        self._durability.before_step()
        self._checker.common.begin_step()
        self.handled = handled_error()
        self.attempt = Attempt(
            context,
            HealRules(
                allow_heal=allow_heal,
                sync=final or not allow_heal or not self._settings.use_async_quorum,
                first_step=self._settings.init_sync and context.progress.step == 0,
            ),
            timeout=limit,
            arguments=arguments,
            turn=turn if self._checker.common.take_turns else "",  # members wait for the turns of all members
        )
        return self.attempt

    def compare_script(self) -> None:
        """Let the groups compare what was added to the script checker since the last request."""
        if (new := self._checker.common.take_new()) is not None:
            optimizers, settings = new
            self._context.compared.add_settings(settings)
            for lines in filter(None, optimizers):
                self._context.compared.add(FixedLines(lines))

    def add_layout(self, lines: list[str] | LayoutPart) -> None:
        """Add to the layout that all groups must have in common. Each DDP adds the layout of its module.

        A group whose lines differ from the job's, also in their order, is refused with the first difference. All groups
        may add lines between two steps, in the same step.

        Args:
            lines: one for each parameter or bucket; or a part whose lines may change between two steps.
        """
        self._context.compared.add(FixedLines(lines) if isinstance(lines, list) else lines)

    def read_after(self, refresh: Callable[[], object]) -> None:
        """Call ``refresh`` each time before the registered state is read."""
        self._context.state.refreshed.append(refresh)

    def refuse_in_rehearsal(self, call: str) -> None:
        """Raise RuntimeError in a rehearsal, for a ``call`` that it cannot undo."""
        if self.rehearsing:
            raise RuntimeError(f"{call} in rehearse(), which undoes what happens in it; call it outside")

    def resume_if_set(self) -> None:
        """Call ``Manager.resume`` if ``durable_every`` or ``resume=True`` say so, as the first step does."""
        if not self.rehearsing:
            self._durability.resume_if_set()

    @contextlib.contextmanager
    def rehearse(self) -> Iterator[None]:
        """Run steps of the script without a quorum, and undo them: ``Manager.rehearse``."""
        if self.rehearsing or self.attempt is not None:
            raise RuntimeError(
                "rehearse() belongs before the first step, and this process has begun one; call it once, after the "
                "model and the optimizer are wrapped and before the training loop"
            )
        context, began = self._context, time.monotonic()
        context.raise_fatal()
        before = StateBefore(self._checker.trained(), context.state.user_state())
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing, self.attempt = False, None
            before.restore()
        context.log.info("rehearsed a step", seconds=round(time.monotonic() - began, 3))

    # ---- end

    def begin_again(self) -> None:
        """Begin a step in which nothing is reduced, if the last one ended with ``should_commit``.

        Scripts for torchft count steps so. The group cannot commit it if it discarded the last one: the script may
        change the weights after it.
        """
        last = self.attempt
        if last is None or last.committed is None or self.rehearsing:
            return
        allow_heal, shrink_only = last.arguments[:2]
        self.start(allow_heal=bool(allow_heal), shrink_only=bool(shrink_only), timeout=None)
        if not last.committed:
            self.current().report(KeepstepError(NOTHING_TO_COMMIT))

    def conclude(self, limit: timedelta) -> bool:
        """End the step, and return whether it commits. ``limit``: of the vote."""
        attempt = self.current()
        context = self._context
        context.raise_fatal()
        committed = attempt.conclude(limit)
        self._durability.settle()  # the script may change its state now
        if committed and attempt.plan is not None:
            tell_imports()
            if not context.progress.following:
                self._durability.committed(attempt.plan)
            self._checker.committed(
                *(context.progress.step, time.monotonic()),
                groups=self.participation()[1],
                collectives=attempt.collectives,
                synchronized=attempt.synchronized,
            )
            self._note_values(attempt)
        elif attempt.plan is not None and not attempt.plan.heal:
            self._checker.discarded()
        self._end_if_repeated(None if committed else attempt.own_error)
        failures, most = context.progress.commit_failures, self._settings.max_retries
        if not committed and most is not None and failures > most:
            raise RuntimeError(
                f"{failures} steps in a row failed, exceeding max_retries={most}; the last one: {attempt.error}"
            )
        return committed

    def _end_if_repeated(self, own: OwnError | None) -> None:
        """End training if the step that ended now failed with the same error of this group as those before it.

        Args:
            own: as of ``RepeatedError.step_ended``.

        Raises:
            RuntimeError: it did, and training on does not help. Its cause is the error.
        """
        if self._repeated.step_ended(own) and own is not None:
            error = RuntimeError(
                f"{LIMIT} steps in a row failed with the same error of this group, so training on does not help: "
                f"{type(own.error).__name__}: {own.error}"
            )
            error.__cause__ = own.error
            self._context.end_with(error)

    def _note_values(self, attempt: Attempt) -> None:
        """Report what the optimizers step with now. Groups whose weights differ by design do not compare it."""
        context, plan = self._context, attempt.plan
        equal = plan is not None and plan.allow_heal and not (attempt.synchronized or context.progress.following)
        values = self._checker.common.of_step() if equal and context.state.compared != frozenset() else ()
        if plan is not None and values and context.asks.last_step is not None:
            digest = context.link.step_values.add(plan.quorum_id, plan.max_step, values)
            context.asks.last_step = _with_values(context.asks.last_step, values=digest)

    def change_begins(self) -> None:
        """Note that the weights begin to change. Unless ``change_ended`` follows, the state is torn.

        ``Optimizer`` calls both around each step of its inner optimizer.
        """
        self._changing = self._context.asks.requests > 0  # before the first step the weights are the script's own

    def change_ended(self) -> None:
        """Note that the change of the weights is complete."""
        self._changing = False

    def check_change(self) -> None:
        """Mark the state as torn if the last change of the weights failed."""
        context = self._context
        if self._changing:
            self._changing = False
            if not context.progress.torn:
                context.log.error("an optimizer failed in the middle of its step", step=context.progress.step)
                context.tear()

    def leave_if_asked(self) -> None:
        """Leave the job now if this group was asked to, by SIGTERM or a drain. LocalSGD and DiLoCo call it.

        For loops that take long between two steps. In the middle of a step it does nothing, and neither does it in a
        group of several ranks, which leave together in their next step.

        Raises:
            Drained: the group has left.
            EvictedExit: the group was evicted.
        """
        context = self._context
        context.raise_fatal()
        between_steps = self.attempt is None or self.attempt.done
        if context.asks.leaving and between_steps and context.settings.world_size == 1:
            self._membership.leave(context)
