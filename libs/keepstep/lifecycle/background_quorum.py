"""Quorums that form while the groups train, so that no group waits for a slow one.

    request                 ask for the quorum, and train on
    formed                  whether it has formed; the same answer in all ranks of the group
    Manager.start_quorum    begin the step with it
    withdraw                give it up

The groups that are ready form the quorum, and the others stay behind. They are *late* in their next step: its
collectives bring them the state of the others, as ``standing`` says, and they do not heal.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from keepstep.group.quorum_plan import QuorumPlan, WorldSizeMode
from keepstep.lifecycle.manager_settings import ManagerSettings
from keepstep.lifecycle.steps import Steps
from keepstep.step.context import StepContext


@dataclass(frozen=True, slots=True)
class Standing:
    """This group among the groups of a step."""

    step: int
    """Number of committed steps of the state that the job goes on from."""
    behind: bool
    """Whether this group is late: it takes part with an older state, and is equal to the others if it commits."""
    anyone_behind: bool
    """Whether any group of the step is late."""
    gives_state: bool
    """Whether this group must give the state to those that are late. One group does, if any of them is."""

    @classmethod
    def of(cls, plan: QuorumPlan) -> Standing:
        """Return the standing of the group of ``plan``."""
        anyone = bool(plan.late)
        return cls(
            step=plan.max_step,
            behind=plan.replica_rank in plan.late,
            anyone_behind=anyone,
            gives_state=anyone and plan.replica_rank == plan.cohort[0],
        )


class BackgroundQuorum:
    """Requests quorums while the group trains.

    Args:
        settings: of the Manager.
        context: of its steps.
        steps: opens the attempt of each quorum.
    """

    def __init__(self, settings: ManagerSettings, context: StepContext, steps: Steps) -> None:
        self._settings = settings
        self._context = context
        self._steps = steps

    def use(self, min_groups: int, grace: timedelta) -> None:
        """Let quorums form from the groups that are ready. Call it in all groups, before the first step.

        From then on every step must bring groups that are behind to the state of the others (``standing``), and call
        ``mark_synchronized``.

        Args:
            min_groups: number of groups that a quorum needs.
            grace: how long a quorum waits for further groups, once so many groups are ready.

        Raises:
            ValueError: a value is out of range, or does not fit the settings of the Manager.
        """
        if min_groups < 1:
            raise ValueError(f"min_groups={min_groups} must be at least 1")
        if min_groups < self._settings.min_replica_size:
            raise ValueError(
                f"min_groups={min_groups} is less than min_replica_size={self._settings.min_replica_size} of the "
                f"Manager, so that a step of {min_groups} groups never commits; make min_groups at least as large"
            )
        if self._context.kept is not None:
            raise ValueError("retry_allreduce=True makes the groups wait for a quorum of the same step; use False")
        if self._context.asks.stands_by:
            raise ValueError("groups that train while a quorum forms have no spares; unset KEEPSTEP_SPARES")
        if grace < timedelta(0):
            raise ValueError(f"grace={grace.total_seconds():g} s must not be negative")
        if self._settings.world_size_mode is not WorldSizeMode.DYNAMIC:
            raise ValueError(
                f"world_size_mode={self._settings.world_size_mode.name} makes the groups wait for spares; use DYNAMIC"
            )
        self._context.asks.min_groups, self._context.asks.grace = min_groups, grace

    def request(self) -> None:
        """Request the quorum of the next step, and return. Do nothing while a request is open or has its quorum.

        Raises:
            Drained, EvictedExit: the process must end.
            KeepstepError: the reason why no quorum formed, other than that it took too long; the next call asks again.
        """
        self._steps.refuse_in_rehearsal("request()")
        context, attempt = self._context, self._steps.attempt
        context.raise_fatal()
        if attempt is not None and not attempt.done:
            if not attempt.quorum_failed:
                return
            self._steps.attempt = None
            try:
                attempt.wait_plan()
            except TimeoutError as error:
                context.log.info("no quorum yet; training on", step=context.progress.step, reason=str(error))
        self._steps.compare_script()
        limit = self._settings.quorum_timeout.total_seconds()
        self._steps.new((), limit).request(context.asks.next(limit, allow_heal=True, shrink_only=False))

    def formed(self) -> bool:
        """Return whether the requested quorum has formed, so that ``start_quorum`` begins its step without a wait.

        Call it in all ranks of the group, equally often: the answer is yes once all ranks have the quorum.
        """
        attempt = self._steps.attempt
        return self._context.ranks.all_ready(attempt is not None and not attempt.done and attempt.quorum_formed)

    def withdraw(self) -> None:
        """Give up the quorum that was requested, unless its step has begun."""
        if self._steps.attempt is not None and self._steps.attempt.requested_early and not self._steps.attempt.done:
            self._steps.attempt.withdraw()

    def standing(self) -> Standing:
        """Wait for the quorum, and return the standing of this group in the step.

        Raises:
            RuntimeError: no step has begun.
        """
        return Standing.of(self._steps.current().wait_plan())
