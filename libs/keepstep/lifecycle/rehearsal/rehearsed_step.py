"""A step of a rehearsal: this group alone, without a quorum. It never commits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from keepstep.collectives.codecs.codec import Round
from keepstep.group.quorum_plan import Participation, QuorumPlan, make_plan
from keepstep.step.attempt import Attempt
from keepstep.step.context import StepContext
from keepstep.step.reducing.after_step import AfterStep
from keepstep.step.reduction import ManagedWork, Reduction
from keepstep.step.step_quorum import HealRules
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum

ALONE = 0, 1
"""As ``Attempt.participation``."""


class RehearsedStep(Attempt):
    """Takes the place of an ``Attempt`` in a rehearsal. Each collective has the result of a group that is alone."""

    def __init__(self, context: StepContext) -> None:
        super().__init__(context, HealRules(allow_heal=False, sync=True, first_step=False), timeout=0.0)
        self._alone = _plan_of_one(context)
        self._works: list[ManagedWork] = []

    def goes_on(self, arguments: tuple[object, ...]) -> bool:  # noqa: ARG002  no quorum depends on them
        return not self.done and not self._works

    @property
    def plan(self) -> QuorumPlan:
        return self._alone

    def wait_plan(self) -> QuorumPlan:
        return self._alone

    def participation(self) -> Participation:
        return ALONE

    def allreduce(self, reduction: Reduction) -> ManagedWork:
        self._works.append(ManagedWork(None, reduction.tensor, write_back=reduction.write_back))
        return self._works[-1]

    def run_collective(self, tensors: list[torch.Tensor], start: Callable[[Round], Work]) -> ManagedWork:  # noqa: ARG002
        self._works.append(ManagedWork(None, tensors))
        return self._works[-1]

    def conclude(self, limit: timedelta) -> bool:  # noqa: ARG002
        for work in self._works:
            if work.write_back is not None:
                work.write_back()
        self.cancel()
        return False

    def cancel(self) -> None:
        self.after = self.after or _AfterRehearsedStep(self._context, ALONE, self.error)


class _AfterRehearsedStep(AfterStep):
    def allreduce(self, reduction: Reduction) -> ManagedWork:
        work: Any = reduction.write_back
        if work is not None:
            work()
        return ManagedWork(None, reduction.tensor)

    def end(self) -> None:
        """Nothing was started."""


def _plan_of_one(context: StepContext) -> QuorumPlan:
    progress, replica_id = context.progress, context.link.replica_id
    member = Member(replica_id, progress.step, progress.lineage, 0, False, MemberInfo())
    quorum = Quorum(0, 0, 0, 0, 0, progress.step, progress.lineage, 0, uniform=True, listed=(member,))
    return make_plan(quorum, replica_id)
