"""The attempts of this rank: each ends with a step that all ranks commit together, or in which a member was lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.amp.grad_scaler import GradScaler

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.one_copy.copies.copy_sender import CopySender
from keepstep.one_copy.copies.keeper import Keeper
from keepstep.one_copy.core.holding import State
from keepstep.one_copy.durable.shard_checkpoints import ShardCheckpoints
from keepstep.one_copy.member_link import MemberLink
from keepstep.one_copy.recovery.build_agreement import NO_LOADER, BuildAgreement
from keepstep.one_copy.recovery.current_quorum import CurrentQuorum
from keepstep.one_copy.recovery.world_recovery import WorldRecovery
from keepstep.one_copy.reporting.shard_reports import ShardReports
from keepstep.one_copy.reporting.step_reports import StepReports
from keepstep.one_copy.shard.built import end_broken_pass
from keepstep.one_copy.shard.own_shard import OwnShard
from keepstep.one_copy.world.world_groups import WorldGroups
from keepstep.runtime.learned_imports import tell_imports
from keepstep.step.step_faults import StepFaults
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import JobClosed, KeepstepError

log = get_logger("keepstep.one_copy")


@dataclass(kw_only=True)
class Attempts:
    """Tries steps until they are committed. On the training thread."""

    refuse_nonfinite: bool
    timeout: timedelta
    """Of a vote."""
    member: MemberLink
    groups: WorldGroups
    shard: OwnShard
    keeper: Keeper
    sender: CopySender
    checkpoints: ShardCheckpoints
    reports: StepReports
    shard_reports: ShardReports
    agreement: BuildAgreement
    recovery: WorldRecovery
    quorum: CurrentQuorum

    def __post_init__(self) -> None:
        self.faults = StepFaults.accepted()
        self._warnings = LogLimiter(seconds=30.0)
        self._ended = False
        """Whether the step of this attempt was committed or refused."""
        self._void = False
        """Whether this attempt has no effect: the others have taken their last step."""

    @contextlib.contextmanager
    def attempt(self) -> Iterator[tuple[Any, ...]]:
        """Try one step: ``OneCopy.attempt``."""
        plan = self.quorum.ready()
        self._void = plan.finishing
        if self.faults is not None:
            self.faults.raise_ordered()
        shard = self.shard
        held = shard.now()
        self._ended = False
        self.agreement.loaders.clear()
        shard.begin()
        if not self._void:
            self.sender.begin(held.state, held.end, held.state.after(plan.quorum_id))
            self._save_if_due()
        self.groups.in_attempt = True
        try:
            with self.groups.muted() if self._void else contextlib.nullcontext():
                yield held.built.objects
        except Exception as error:
            if self._void:
                log.debug("error in an attempt without effect", reason=str(error))
            elif shard.torn or not self.quorum.is_loss(error):
                raise
            else:
                self.quorum.attempt_failed(error, committed=self._ended)
        else:
            if not self._ended and not self._void and shard.gradients():
                log.warning("attempt ended without commit(): the step is dropped", step=held.state.step)
                self.reports.discarded(plan, held.state, "commit() was not called")
                shard.drop()
        finally:
            self.groups.in_attempt = False
            if self._void:
                end_broken_pass(held.built.model)
                shard.drop()

    def commit(self, scaler: GradScaler | None) -> bool:
        """End the step: ``OneCopy.commit``."""
        if not self.groups.in_attempt or self._ended:
            raise RuntimeError("commit() belongs at the end of `with job.attempt()`, once in each")
        if self._void:
            return False
        shard, recovery, plan = self.shard, self.recovery, self.quorum.plan
        assert plan is not None
        state = shard.now().state
        options = self.agreement.step_digest()
        if self.faults is not None:
            for gradient in shard.gradients():
                self.faults.spoil(gradient)
        ok = not self.refuse_nonfinite or shard.finite()
        shard.unscale(scaler, lambda mine: not self.groups.vote([int(not mine)], self.timeout)[0])
        following, end = state.after(plan.quorum_id), shard.end()
        if not shard.replayed:
            self.sender.filled()  # bases that are on their way are of the state before
        shard.step_ahead()
        self.sender.finish(following, end)
        self.quorum.raise_if_lost()
        shard.voted = plan.quorum_id
        mine = int(ok) * (1 + self.shard_reports.covered)
        values = self.groups.vote(
            [mine, state.step, -state.step, options, -options, *self.quorum.wishes(), *self.agreement.loader_votes()],
            self.timeout,
        )
        if values[1] != -values[2]:
            raise KeepstepError(f"the ranks are at different steps, {values[1]} to {-values[2]}; report this as a bug")
        alike, same_data = values[3] == -values[4], values[7] in (-values[8], NO_LOADER)
        if not values[0] or not alike or not same_data:
            self._refused(plan, state, finite=ok, alike=alike, same_data=same_data)
            return False
        shard.apply(following)
        self._ended = True
        self.member.committed()
        self.keeper.forget(but=recovery.kept())
        covered = values[0] > 1
        self.quorum.committed(covered, bool(values[5]), values[6])
        self.reports.committed(plan, state, following)
        self.shard_reports.committed(covered=covered)
        tell_imports()
        return True

    def _refused(self, plan: QuorumPlan, state: State, *, finite: bool, alike: bool, same_data: bool) -> None:
        """Drop a step that the ranks have refused. The arguments are as of ``commit``."""
        self.shard.drop()
        self._ended = True
        reason = "a rank refused the step" if alike else "the optimizers differ"
        reason = reason if same_data else "the data loaders differ"
        self.reports.discarded(plan, state, reason)
        if not finite:
            reason = "gradients of this rank are not finite"
            if self._warnings.allows(time.monotonic()):
                log.warning("step dropped", step=state.step, reason=reason)
        if not same_data:
            self.agreement.compare_loaders(state.step)
        elif not alike:
            self.agreement.compare_step(state.step)
        self.quorum.refused(state.step, reason)

    def _save_if_due(self) -> None:
        if self.quorum.plan is not None and self.shard.held is not None:
            self.checkpoints.before_step(self.quorum.plan.epoch)

    def finish(self) -> None:
        """Wait until all ranks have taken their last step, and its checkpoint is committed."""
        with contextlib.suppress(JobClosed):  # all ranks have asked for it at the same step
            while True:
                self._save_if_due()
                self.checkpoints.finish()
                self.quorum.ready(final=True)
