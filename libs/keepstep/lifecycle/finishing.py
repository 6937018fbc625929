"""The end of training: wait until all groups have the same final state.

A group that died in the last steps comes back, heals from the others, and finishes with them. The quorum of the groups
that finish takes no step: groups that are behind heal in it. Groups that publish the final state do so after a quorum
in which all have it, and ask again; the lighthouse has compared by then whether all groups publish.

Each group sends the root digest of its state with its request, so that no group finishes with other weights than the
others: those that differ heal, or end with an error (docs/guarantees.md).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from keepstep.group.agreement import LayoutChanges
from keepstep_mesh.errors import JobClosed, KeepstepError
from keepstep_mesh.protocol.lineage import is_committed
from keepstep_mesh.protocol.membership import PUBLISHED, TO_PUBLISH, UNPUBLISHED, StateRoot

if TYPE_CHECKING:
    from keepstep.lifecycle.durability import Durability
    from keepstep.lifecycle.manager_settings import ManagerSettings
    from keepstep.lifecycle.membership import GroupMembership
    from keepstep.lifecycle.steps import Steps
    from keepstep.step.context import StepContext


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a job whose groups finished together.

    Args:
        step: number of committed steps, equal in all groups.
        groups: number of groups that have the final state.
    """

    step: int
    groups: int


class Finishing:
    """Ends the training of this process together with the other groups.

    Args:
        settings: of the Manager.
        context: of its steps.
        membership: leaves the job when this group was asked to.
        durability: publishes the final state.
        steps: opens the attempts in which groups that are behind heal.
    """

    def __init__(
        self,
        settings: ManagerSettings,
        context: StepContext,
        membership: GroupMembership,
        durability: Durability,
        steps: Steps,
    ) -> None:
        self._settings = settings
        self._context = context
        self._membership = membership
        self._durability = durability
        self._steps = steps
        self._finished: Finished | None = None
        self._published = False

    def finish(self, timeout: timedelta | None = None, *, publish: bool = False) -> Finished:
        """End the training: ``Manager.finish``."""
        steps = self._steps
        steps.refuse_in_rehearsal("finish()")
        context = self._context
        context.raise_fatal()
        if self._finished is not None:
            return self._finished
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        self._end_open_step()
        if context.follower is not None:
            context.follower.finish()
        last_step = steps.attempt
        last_plan = None if last_step is None else last_step.plan
        # groups whose rounds forbid heals may hold different weights between two averages
        compares = last_plan is None or last_plan.allow_heal
        root = _final_root(context) if compares else None
        finished: Finished | None = None
        while finished is None:
            if context.asks.leaving and context.settings.world_size == 1:
                self._membership.leave(context)
            limit = self._settings.quorum_timeout.total_seconds()
            if deadline is not None:
                limit = min(limit, max(0.0, deadline - time.monotonic()))
            try:
                context.asks.root = root
                finished = self._ask_for_the_end(limit, deadline, publish=publish)
                plan = None if steps.attempt is None else steps.attempt.plan
                if root is not None and finished is None and (plan is None or plan.heal):
                    root = _final_root(context)
            except TimeoutError as error:
                context.raise_fatal()
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"the groups have not finished within {timeout}: {error}") from None
                context.log.warning("not finished yet; asking again", step=context.progress.step, reason=str(error))
        self._finished, steps.ended_at = finished, finished.step
        steps.attempt = last_step  # participating_rank() and the like are of that step
        return finished

    def _end_open_step(self) -> None:
        attempt = self._steps.attempt
        if attempt is None or attempt.done:
            return
        if attempt.requested_early:
            attempt.withdraw()
        else:
            attempt.abandon()

    def _ask_for_the_end(self, limit: float, deadline: float | None, *, publish: bool) -> Finished | None:
        """Ask with ``final``. Return None if a quorum forms: this group heals in it, or publishes the state of all.

        None too if this group has to ask again with other parameters.
        """
        context = self._context
        step, attempt = context.progress.step, self._steps.new((), limit, final=True)
        wanted = PUBLISHED if self._published else TO_PUBLISH if publish else UNPUBLISHED
        context.compared.read()
        try:
            attempt.begin(context.asks.next(limit, allow_heal=True, shrink_only=False, publish=wanted))
        except LayoutChanges as error:
            context.log.info("adopt the parameters of the job", reason=str(error))
            return None
        except JobClosed as closed:  # and this group holds the final state
            closed.with_traceback(None)  # it is in a cycle, and would hold the script's frames, with its loaders
            context.log.info("all groups have finished", step=closed.step, groups=closed.groups)
            facts = {"lineage": context.progress.lineage, "closed_ms": closed.closed_ms}
            context.steps.write("finished", context.progress.step, 0, **facts)
            if publish:  # the lighthouse is of the release before, or did not wait for this group
                self._publish(deadline)
            return Finished(context.progress.step, closed.groups)
        attempt.end_finishing()
        if context.progress.step < step:
            raise KeepstepError(
                f"the job went back from step {step} to step {context.progress.step} while this group finished; start "
                f"the group again, so that it trains on"
            )
        if publish and not attempt.wait_plan().healing:
            self._publish(deadline)
        return None

    def _publish(self, deadline: float | None) -> None:
        """Write the final state to the relays, once. If ``deadline`` (monotonic) comes first, the next call goes on."""
        if not self._published:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._published = self._durability.publish(left) or left is None


def _final_root(context: StepContext) -> StateRoot | None:
    """Return the root digest of the state with which this group has taken its last step. Call it in every rank."""
    progress = context.progress
    final = is_committed(progress.lineage)  # else another group has the state of the job, or none is trained
    return context.state.root_at(progress.step, progress.lineage) if final else None
