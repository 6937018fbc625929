"""The objects and values that all steps of this process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from torch.distributed import Store

from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.group.compared_layout import ComparedLayout
from keepstep.group.group_link import LinkSettings
from keepstep.group.quorum_plan import QuorumPlan, WorldSizeMode
from keepstep.group.ranks.rank_link import RankLink
from keepstep.runtime.exits import StateMismatchExit
from keepstep.runtime.held_signals import HeldSignals
from keepstep.runtime.loop_thread import LoopThread
from keepstep.state.errors import StateMismatch
from keepstep.step.asks import Asks
from keepstep.step.evidence.failure_evidence import FailureEvidence
from keepstep.step.live_state import LiveState
from keepstep.step.progress import GroupProgress
from keepstep.step.rank_votes import RankVotes
from keepstep.step.reconfigurer import Reconfigurer
from keepstep.step.reporting.step_log import StepLog
from keepstep.step.reporting.step_telemetry import StepTelemetry
from keepstep.step.retrying.kept_reductions import KeptReductions
from keepstep.step.step_faults import StepFaults
from keepstep.transfer.exchange import Exchange
from keepstep_mesh.config.logging import Logger
from keepstep_mesh.errors import ExitWithReason, JobClosed

MAX_UNFIT_HEALS = 3
"""Number of heals in a row, from different groups where possible, that may fail because the state does not fit."""


class Follower(Protocol):
    """Follows the steps of other groups without weights, while their state arrives. On the training thread.

    ``catching_up.catch_up`` implements it.
    """

    automatic: bool
    """Whether the script did not ask for it: nothing relies on a replay then."""

    @property
    def source(self) -> str:
        """replica_id of the group that the state comes from; empty: none does."""

    @property
    def doubts(self) -> bool:
        """Whether the weights are those of a replay that was not compared: the next quorum brings what differs."""

    def can_begin(self, plan: QuorumPlan) -> bool:
        """Return whether this group, which the plan tells to heal, follows instead. From any thread."""

    def objection(self, plan: QuorumPlan) -> Exception | None:
        """Return why no group must commit the step of ``plan``; None: it may commit. From any thread."""

    def hands_out(self, plan: QuorumPlan) -> None:
        """Begin to copy the state of this group, because another one takes it over in this step. From any thread."""

    def check(self, plan: QuorumPlan) -> None:
        """Give up, unless the group can go on with this plan."""

    def begin(self, plan: QuorumPlan, exchange: Exchange) -> None:
        """Follow from the step of ``plan`` on, which the group has taken part in, and which commits."""

    def followed(self, plan: QuorumPlan, participants: int, write_back: Callable[[], None]) -> None:
        """Note that a step was committed. ``write_back``: writes the averaged buffers of the step again."""

    def finish(self) -> None:
        """Wait for the state and replay all steps, or give up."""

    def settle(self, call: str) -> None:
        """Wait for the state and replay all steps, because the script reads the weights in ``call``, between two steps.

        KeepstepError: the state was not received, and the weights are older than the script has to think.
        """

    def settle_last(self) -> None:
        """Do the same at the end of the training. An error is logged."""

    def close(self) -> None:
        """End the transfer. May be called more than once."""


class DurableStates(Protocol):
    """Durable checkpoints of the job, where a quorum needs them. ``lifecycle.durability`` implements it."""

    may_resume: bool
    """Whether this group may have a later state at a relay than the one with which it asks."""

    def resume_in_quorum(self, plan: QuorumPlan | None) -> bool:
        """Load the newest durable checkpoint, if it is newer than all states in the first quorum and none is live.

        It may not resume again after this.

        Args:
            plan: of the quorum; None: none formed, because the job does not begin at the state of this group.

        Returns:
            Whether it did.
        """

    def find_final(self, closed: JobClosed) -> None:
        """Find the final state of a closed job at a relay. JobClosedExit: none is found, or to be loaded."""

    def load_final(self) -> None:
        """Load the final state that was found, if one was. JobClosedExit: it could not be loaded."""


@dataclass(slots=True)
class HealCounts:
    """The heals of this process."""

    source: str = ""
    """replica_id of the group that this one heals from in the current quorum, or empty. Set by ``StepQuorum``."""
    late: int = 0
    """Number of heals in a row that ran out of time; each one doubles the time of the next. Counted by those who heal:
    ``StateExchange`` and ``CatchUp``."""
    unfit: int = 0
    """Number of heals in a row that failed because the state does not fit this group. Counted by ``check_heal``."""


@dataclass(slots=True, kw_only=True)
class StepContext:
    """Shared by the Manager and all its attempts. ``lifecycle.wiring`` makes it."""

    # ---- parts of this process; each changes only itself

    loop_thread: LoopThread
    link: RankLink
    reconfigurer: Reconfigurer
    transport: CheckpointTransport[dict[str, Any]]
    state: LiveState
    progress: GroupProgress
    compared: ComparedLayout
    asks: Asks
    ranks: RankVotes
    evidence: FailureEvidence
    steps: StepLog
    telemetry: StepTelemetry
    log: Logger
    signals: HeldSignals = field(default_factory=HeldSignals)
    """Holds signals back from the commit of a step to the end of the change of the weights."""
    faults: StepFaults | None
    """Faults that ``keepstep chaos`` orders; None: this process accepts none."""
    store: Store | None
    """The launcher's store. Its server ends with the last reference, and other ranks may connect to it late."""

    # ---- settings

    settings: LinkSettings
    timeout: timedelta
    """Of a collective, of a vote, and of a heal that makes no progress."""
    min_replica_size: int
    world_size_mode: WorldSizeMode
    refuse_nonfinite: bool
    """Vote no if a result of the step has a NaN or an infinity."""

    # ---- set before the first step, by the part that is named, or never

    durable: DurableStates | None = None
    """``Durability`` sets itself."""
    kept: KeptReductions | None = None
    """The all-reduces of the present step, set by ``Manager`` with ``retry_allreduce``; None: no step is retried."""
    follower: Follower | None = None
    """Lets this group catch up instead of healing, set by ``Steps.follow_with``; None: it heals."""

    # ---- what changes

    heals: HealCounts = field(default_factory=HealCounts)
    fatal: BaseException | None = None
    """The error that ended training in this process; every later step raises it. Set by the methods below."""

    def log_progress(self, event: str) -> None:
        """Write ``event`` to the step log, with the step and lineage of this group."""
        self.steps.write(event, self.progress.step, 0, lineage=self.progress.lineage)

    def end_later(self, error: BaseException) -> None:
        """Raise ``error`` in every later step. From any thread."""
        self.fatal = error

    def end_with(self, error: BaseException) -> NoReturn:
        """Raise ``error`` now and in every later step."""
        self.fatal = error
        raise error

    def raise_fatal(self) -> None:
        """Raise the error that ended training in this process, if any."""
        if self.fatal is not None:
            raise self.fatal

    def end_group(self, error: ExitWithReason) -> NoReturn:
        """Raise ``error`` now and in every later step, and report its reason as the end of the whole group."""
        self.fatal = error  # before the report, which ends the process of a group of several ranks
        self.ranks.fail_group(error.reason)
        raise error

    def check_heal(self, error: Exception) -> None:
        """End the group after ``MAX_UNFIT_HEALS`` heals in a row whose errors no further heal can repair."""
        if isinstance(error, StateMismatch):
            self.heals.unfit += 1
            if self.heals.unfit >= MAX_UNFIT_HEALS:
                self.end_group(StateMismatchExit(f"{error} (tried {self.heals.unfit} times)"))

    def tear(self, step: int = 0) -> None:
        """Mark the state as torn: this group heals from another, and no group heals from it. ``step``: of the job."""
        self.progress.tear(step)
        self.steps.write("torn", 0, 0, lineage=self.progress.lineage)

    def diverge(self) -> None:
        """Mark the weights as different from the cohort's: no group heals from this one until it has healed."""
        self.log.error("weights differ from those of the other groups", step=self.progress.step)
        self.progress.diverge()
        self.steps.write("diverged", self.progress.step, 0, lineage=self.progress.lineage)
