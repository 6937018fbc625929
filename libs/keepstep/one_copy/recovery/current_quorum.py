"""The quorum of this rank: it is asked for before each step, and each new one begins with a recovery."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.one_copy.copies.frames import CopyError
from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.mesh_shape import MeshShape
from keepstep.one_copy.core.recovery_plan import Kind, Recovery
from keepstep.one_copy.core.world import unkept
from keepstep.one_copy.durable.shard_checkpoints import ShardCheckpoints
from keepstep.one_copy.member_link import MemberLink
from keepstep.one_copy.recovery.build_agreement import UnfitMembersError
from keepstep.one_copy.recovery.world_recovery import StateLost, WorldRecovery
from keepstep.one_copy.reporting.shard_reports import ShardReports
from keepstep.one_copy.reporting.step_reports import StepReports
from keepstep.one_copy.shard.own_shard import OwnShard
from keepstep.one_copy.world.world_groups import WorldGroups
from keepstep.process_group.group_errors import ProcessGroupError, UnsupportedCollectiveError
from keepstep.rendezvous.key_value_server import RendezvousError
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import Drained, KeepstepError
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.lineage import NEW
from keepstep_mesh.protocol.membership import UNKNOWN

log = get_logger("keepstep.one_copy")

LOSS_SECONDS = 1.0
"""Longest wait for news of a loss, after an error that a loss may have caused."""
UNFIT_SECONDS, MOST_UNFIT_SECONDS = 0.5, 4.0
"""First and longest pause before the next quorum, while ``build`` gives another model for the number of members."""
MOST_UNEXPLAINED = 4
"""Number of failed or refused attempts of a step in a row, without a lost member or a cut, after which the script is at
fault."""
NO_SEAT = 1 << 62
"""In place of the seat of a member that leaves: this one stays."""


class StepRefusedError(KeepstepError):
    """The ranks have refused a step again and again."""


@dataclass(kw_only=True)
class CurrentQuorum:
    """Keeps this rank in a quorum whose world is formed, and notices when it ends."""

    shape: MeshShape
    copies: int
    """Number of keepers of each rank."""
    quorum_timeout: timedelta
    member: MemberLink
    groups: WorldGroups
    shard: OwnShard
    checkpoints: ShardCheckpoints
    reports: StepReports
    shard_reports: ShardReports
    recovery: WorldRecovery

    def __post_init__(self) -> None:
        self.plan: QuorumPlan | None = None
        """Of the last quorum; None: the job has not begun."""
        self._broken = ""
        """Why the groups of the world are not usable; empty: they are."""
        self._asked: State | None = None
        """State with which this rank has asked for its quorum."""
        self._pause = UNFIT_SECONDS
        self._warnings = LogLimiter(seconds=30.0)
        self._failures = 0
        self._unexplained = 0
        """Number of failed attempts of this step in a row without a lost member or a cut network."""
        self._covered = self._may_leave = True
        """Whether all ranks had copies of their shards at the last commit, and whether this member leaves then. All may
        leave at once, and otherwise one after the other, so that no member leaves together with its keeper."""

    # ---- before a step

    def ready(self, *, final: bool = False) -> QuorumPlan:
        """Agree with the others on the members, and recover if they have changed.

        Args:
            final: no step is left.

        Raises:
            StateLost: members were lost together with their keepers.
        """
        while True:
            plan = self._ask(final=final)
            known, self.plan = self.plan, plan
            if known is not None and plan.quorum_id == known.quorum_id and not self._broken:
                return plan
            began, before = time.monotonic(), self.shard.held
            state = before.state if before is not None else None
            try:
                done = self.recovery.run(plan)
            except UnfitMembersError as error:
                self._wait_for_members(str(error))
            except StateLost as error:
                self.shard_reports.lost(plan.quorum_id, error.step)
                raise
            except Exception as error:
                if self.shard.torn or not self.is_loss(error):
                    raise
                log.warning("recovery failed; trying again", reason=str(error) or type(error).__name__)
                self._break(error, str(error))
            else:
                self._broken, self._pause = "", UNFIT_SECONDS
                self._note_recovery(plan, done, state, built=self.shard.held is not before, began=began)
                if done.kind is not Kind.RESUMED or self.shard.now().state == self._asked:
                    return plan
                self._failures = 0  # ask again, so that the lighthouse knows from which step the job goes on

    def _wait_for_members(self, reason: str) -> None:
        self._broken = reason
        if self._warnings.allows(time.monotonic(), reason):
            log.warning("no step possible; waiting for other members", reason=reason)
        time.sleep(self._pause)  # nothing tells when another member comes
        self._pause = min(2 * self._pause, MOST_UNFIT_SECONDS)

    def _note_recovery(
        self, plan: QuorumPlan, recovery: Recovery, before: State | None, *, built: bool, began: float
    ) -> None:
        seconds, state = time.monotonic() - began, self.shard.now().state
        if before is not None and not built and state != before:
            self.reports.forwarded(plan.epoch, recovery.previous, before, state)
        self.reports.recovered(plan, recovery, state, built=built, seconds=seconds)
        self.shard_reports.recovered(recovery, state.step, seconds, went_back=recovery.given_up)
        self._covered = self._may_leave = recovery.kind in (Kind.FRESH, Kind.RESUMED)

    def _ask(self, *, final: bool) -> QuorumPlan:
        held = self.shard.held
        state = held.state if held is not None else self._asked or self.checkpoints.newest_state()
        state = state or State(0, f"{NEW}{self.member.replica_id}")  # not less than before: the job would go back
        self._asked = state
        ask = RankAsk(
            request=0,
            step=state.step,
            lineage=state.lineage,
            shrink_only=False,
            commit_failures=max(self._failures, 1 if self._broken else 0),
            timeout_ms=0,
            final=final,
            multiple=self.shape.multiple(self.member.settings.world_size),
            sharded=True,
        )
        while True:
            try:
                seconds, spare = self.quorum_timeout.total_seconds(), held is None and self.member.settings.stands_by
                return self.reports.ask(ask, seconds, may_leave=final or self._lets_go(), stands_by=spare)
            except TimeoutError as error:
                log.warning("no quorum yet; asking again", step=state.step, reason=str(error))
            except Drained:
                if held is not None and self.plan is not None and not self._broken:
                    self.checkpoints.before_step(self.plan.epoch)  # otherwise the begin of the next step stores it
                self.checkpoints.finish()
                self.member.end()
                raise

    # ---- the vote on a step

    def wishes(self) -> list[int]:
        """Return what this rank tells in a vote beside the step: whether its member is to leave, and the seat of it."""
        leaves = self.member.leaving
        return [int(leaves), self._seat if leaves else NO_SEAT]

    def committed(self, covered: bool, all_leave: bool, first_leaver: int) -> None:
        """Note a committed step.

        Args:
            covered: all ranks had copies of their shards.
            all_leave: all members are to leave.
            first_leaver: the first seat of a member that is to leave.
        """
        self._failures = self._unexplained = 0
        self._covered = covered
        self._may_leave = all_leave or (covered and first_leaver == self._seat)

    def refused(self, step: int, reason: str) -> None:
        """Note that the ranks have refused a step. StepRefusedError, in all ranks: the next attempt would be the same.

        Args:
            step: number of committed steps before it.
            reason: of this rank, or that another one has refused it.
        """
        self._unexplained += 1
        if self._unexplained >= MOST_UNEXPLAINED:
            raise StepRefusedError(
                f"the step after step {step} was refused {self._unexplained} times in a row: {reason}; each attempt "
                f"has the same samples and random numbers, so training on does not help: correct the data or the script"
            )

    @property
    def _seat(self) -> int:
        held = self.shard.now()
        return held.rank // held.world.ranks_per_seat

    def _lets_go(self) -> bool:
        """Return whether this member leaves now if it was ordered to, because no shard is lost with it."""
        held, plan = self.shard.held, self.plan
        if held is None or plan is None or not self._broken:
            return self._may_leave
        names, world = self.member.lost_members(plan.quorum_id), held.world
        lost = {seat for seat, one in enumerate(world.seats) if one.replica_id in names}
        return self._covered and unkept(world, {*lost, self._seat}, self.copies) == unkept(world, lost, self.copies)

    # ---- losses

    def ended(self, quorum_id: int, reason: str) -> None:
        """End all waits of a quorum. From the event-loop thread."""
        plan = self.plan
        if quorum_id >= 0 and (plan is None or plan.quorum_id != quorum_id):
            return
        self.recovery.end(reason)
        self.checkpoints.hurry()

    def loss(self) -> str:
        """Return why the quorum has ended; empty: it has not."""
        if self.member.fatal is not None:
            raise self.member.fatal
        return self.member.loss_of(self.plan.quorum_id) if self.plan is not None else ""

    def raise_if_lost(self) -> None:
        """Raise CopyError if the quorum has ended."""
        if reason := self.loss():
            raise CopyError(reason)

    def is_loss(self, error: Exception) -> bool:
        """Return whether a lost member has caused an error."""
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, (UnsupportedCollectiveError, StepRefusedError)):
                return False
            if isinstance(seen, (ProcessGroupError, CopyError, RendezvousError)):
                return True
            seen = seen.__cause__ or seen.__context__
        deadline = time.monotonic() + (LOSS_SECONDS if isinstance(error, (RuntimeError, TimeoutError)) else 0.0)
        while True:
            if self.loss() or self.groups.errored() is not None:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)  # nothing tells when an error of a group arrives

    def attempt_failed(self, error: Exception, *, committed: bool) -> None:
        """Note an attempt that a lost member has ended. Raise the error if no member is ever lost.

        Args:
            error: which has ended it.
            committed: its step was committed before.
        """
        shard, plan = self.shard, self.plan
        reason = str(error) or type(error).__name__
        log.warning("step failed", step=shard.now().state.step, reason=reason)
        if not committed:
            self.reports.discarded(plan, shard.now().state, reason)
        shard.whole = not committed
        explained = plan is not None and self.member.is_explained(plan.quorum_id)
        self._unexplained = 0 if explained else self._unexplained + 1
        if self._unexplained >= MOST_UNEXPLAINED:
            raise error
        self._break(error, f"rank {shard.now().rank}: {reason}")

    def _break(self, error: Exception, reason: str) -> None:
        self.member.evidence.failed(UNKNOWN, error)
        self._broken = reason
        self._failures += 1
        self.recovery.end(reason)
