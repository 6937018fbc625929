"""The objects and values that all steps of this process share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Store

from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.group.agreement import Layout, LayoutChanges, LayoutPart, PartsMissing, layout_digest
from keepstep.group.group_link import LinkSettings
from keepstep.group.group_peers import first_layout_difference, first_values_difference
from keepstep.group.quorum_plan import QuorumPlan, WorldSizeMode
from keepstep.group.ranks.rank_link import RankLink
from keepstep.runtime.exits import StateMismatchExit
from keepstep.runtime.held_signals import HeldSignals
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.state.errors import StateMismatch
from keepstep.step.evidence.failure_evidence import FailureEvidence
from keepstep.step.evidence.repeated_error import LIMIT, OwnError, RepeatedError
from keepstep.step.following import Follower
from keepstep.step.live_state import LiveState
from keepstep.step.progress import GroupProgress
from keepstep.step.reconfigurer import Reconfigurer
from keepstep.step.reporting.step_log import StepLog
from keepstep.step.reporting.step_telemetry import StepTelemetry
from keepstep.step.retrying.kept_reductions import KeptReductions
from keepstep.step.step_faults import StepFaults
from keepstep_mesh.config.logging import Logger
from keepstep_mesh.errors import ExitWithReason, JobClosed, KeepstepError
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.job_settings import with_settings
from keepstep_mesh.protocol.membership import StateRoot, StepReport
from keepstep_mesh.text import listed

MAX_INCOMPLETE = 3
"""Number of steps in a row that a script takes alone until it has added what the job has."""
MAX_UNFIT_HEALS = 3
"""Number of heals in a row, from different groups where possible, that may fail because the state does not fit."""


@dataclass(slots=True)
class StepContext:
    """Shared by the Manager and all its attempts."""

    loop_thread: LoopThread
    link: RankLink
    settings: LinkSettings
    reconfigurer: Reconfigurer
    transport: CheckpointTransport[dict[str, Any]]
    state: LiveState
    progress: GroupProgress
    steps: StepLog
    telemetry: StepTelemetry
    log: Logger
    timeout: timedelta
    """Of a collective, of a vote, and of a heal that makes no progress."""
    evidence: FailureEvidence
    min_replica_size: int
    world_size_mode: WorldSizeMode
    signals: HeldSignals = field(default_factory=HeldSignals)
    """Holds signals back from the commit of a step to the end of the change of the weights."""
    repeated: RepeatedError = field(default_factory=RepeatedError)
    """Ends the group after the same error of its own in several steps in a row."""
    changing: bool = False
    """An optimizer of the script has begun a step, and has not ended it."""
    fatal: BaseException | None = None
    """The error that ended training in this process; every later step raises it."""
    job_settings: str = ""
    """The settings that decide this group's arithmetic; those of all groups must be equal."""
    layout: Layout = field(default_factory=Layout)
    """The parameters and buckets of this rank."""
    layout_lines: list[str] = field(default_factory=list)
    """Those of the layout, as this rank compares them."""
    layout_digest: str = ""
    """Digest of ``job_settings`` and ``layout_lines``; empty without a layout."""
    layout_of_job: list[str] | None = None
    """The lines of another group, because the lighthouse refused those of this one; None: it did not."""
    incomplete: int = 0
    """Number of requests in a row that were refused because the job has parts that this group does not have."""
    refuse_nonfinite: bool = False
    """Vote no if a result of the step has a NaN or an infinity."""
    kept: KeptReductions | None = None
    """The all-reduces of the present step, with ``retry_allreduce``; None: no step is retried."""
    last_step: StepReport | None = None
    """Report of this rank on its last step, for the next request."""
    root: StateRoot | None = None
    """The root digest to send with the next request, because the lighthouse asked for it."""
    stands_by: bool = False
    """This group has been in no quorum, and may wait as a spare."""
    leaves_soon: str = ""
    """Why this group has to leave soon, and asks for a spare; empty: it stays, or leaves at once."""
    leaving: str = ""
    """Why this group is about to leave the job; empty while it is not."""
    source: str = ""
    """replica_id of the group that this one heals from in the current quorum, or empty."""
    follower: Follower | None = None
    """Lets this group catch up instead of healing; None: it heals."""
    late_heals: int = 0
    """Number of heals in a row that ran out of time; each one doubles the time of the next."""
    unfit_heals: int = 0
    """Number of heals in a row that failed because the state does not fit this group."""
    resume: Callable[[QuorumPlan | None], bool] | None = None
    """Loads the newest durable checkpoint, if it is newer than all states in the first quorum and none of those is
    live, or if the job does not begin at the state of this group (no plan). Returns whether it did. None: it is loaded
    already, or not to be loaded."""
    find_final: Callable[[JobClosed], None] | None = None
    """Finds the final state of a closed job at a relay, and sets ``load_final``; else raises JobClosedExit."""
    load_final: Callable[[], None] | None = None
    """Loads the final state at the end of the attempt. JobClosedExit if it cannot. None: none was found."""
    requests: int = 0
    """Number of requests for a quorum so far."""
    min_groups: int = 0
    """Number of groups that form a quorum while the others train on; 0: groups wait for the quorum."""
    grace: timedelta = timedelta(0)
    """How long such a quorum waits for further groups."""
    last_attempt: int = 0
    """``QuorumPlan.attempt`` of the last step."""
    polls: int = 0
    """Number of polls of the ranks since then."""
    faults: StepFaults | None = None
    """Faults that ``keepstep chaos`` orders; None: this process accepts none."""
    store: Store | None = None
    """The launcher's store. Its server ends with the last reference, and other ranks may connect to it late."""

    def next_ask(self, timeout: float, *, allow_heal: bool, shrink_only: bool, publish: str = "") -> RankAsk:
        """Build this rank's request for the quorum of its next step; ``timeout`` in seconds.

        ``publish``: as in ``QuorumRequest``; not empty: no step follows.
        """
        self.requests += 1
        progress = self.progress
        return RankAsk(
            request=self.requests,
            step=progress.step,
            lineage=progress.lineage,
            shrink_only=shrink_only,
            commit_failures=max(progress.commit_failures, 1 if self.reconfigurer.broken else 0),
            timeout_ms=max(1, round(timeout * 1000)),
            leaving=self.leaving,
            layout=self.layout_digest,
            checkpoint=self.transport.metadata(),
            root=self.root,
            batches_committed=progress.batches_committed,
            allow_heal=allow_heal,
            settings=self.job_settings,
            last_step=self.last_step,
            min_groups=self.min_groups,
            grace_ms=round(self.grace.total_seconds() * 1000),
            final=publish != "",
            replace=self.leaves_soon,
            publish=publish,
        )

    def ended_attempt(self, attempt: int) -> None:
        """Note the last attempt that the ranks voted on. All of them count their polls from there."""
        if attempt != self.last_attempt:
            self.last_attempt, self.polls = attempt, 0

    def add_layout(self, part: LayoutPart) -> None:
        """Add to the layout that all groups must have in common."""
        self.layout.add(part)
        self.read_layout()

    def read_layout(self) -> None:
        """Read the layout again, which may have changed since the last step. Adopt that of the job, if it is known."""
        if self.layout_of_job is not None:
            lines, self.layout_of_job = self.layout_of_job, None
            self.layout.adopt(lines)
        if (lines := self.layout.lines()) != self.layout_lines:
            self.layout_lines, self.incomplete = lines, 0
            self.layout_digest = layout_digest(self.job_settings, lines)
            self.link.layout_lines = lines

    def add_settings(self, settings: Mapping[str, str]) -> None:
        """Add settings that all groups must have in common, in the place of those of the same name."""
        self.job_settings = with_settings(self.job_settings, settings)
        self.layout_digest = layout_digest(self.job_settings, self.layout_lines)

    def log_progress(self, event: str) -> None:
        """Write ``event`` to the step log, with the step and lineage of this group."""
        self.steps.write(event, self.progress.step, 0, lineage=self.progress.lineage)

    def difference_from(self, address: str) -> tuple[list[str], str]:
        """Return what ``first_layout_difference`` does, of the group served at ``address``. On the training thread."""
        asking = first_layout_difference(
            address,
            self.settings.token,
            self.layout_lines,
            settings=self.job_settings,
            values=self.link.step_values.lines(),
        )
        return self.loop_thread.call(asking, CALL_MARGIN_SECONDS)

    def changed_layout(self, lines: list[str], peer_step: int, refused: str) -> LayoutChanges | None:
        """Return how this group comes to the layout of the job; None: it does not.

        Args:
            lines: of another group, which takes ``peer_step``.
            refused: why the lighthouse refused those of this one.
        """
        missing, behind = self.layout.missing(lines), self.progress.torn or peer_step > self.progress.step
        if self.layout.could_be(lines):
            self.layout_of_job = lines
            return LayoutChanges(f"{refused}; this group adopts the layout of the job")
        if not missing or not behind or self.incomplete >= MAX_INCOMPLETE:
            return None
        self.incomplete += 1
        self.layout_of_job = lines
        self.tear(peer_step)
        return PartsMissing(
            f"the job is at step {peer_step} and has {len(missing)} entries that this group does not have yet "
            f"({listed(missing, 3)}); the script takes this step alone, and may add them before the next one"
        )

    def values_difference_from(self, address: str) -> str:
        """Describe in which values the optimizers of the last steps differ; empty: none is known. As above."""
        asking = first_values_difference(address, self.settings.token, self.link.step_values.lines())
        return self.loop_thread.call(asking, CALL_MARGIN_SECONDS)

    def end_with(self, error: BaseException) -> NoReturn:
        """Raise ``error`` now and in every later step."""
        self.fatal = error
        raise error

    def end_if_repeated(self, own: OwnError | None) -> None:
        """End training if the step that ended now failed with the same error of this group as those before it.

        Args:
            own: as of ``RepeatedError.step_ended``.

        Raises:
            RuntimeError: it did, and training on does not help. Its cause is the error.
        """
        if self.repeated.step_ended(own) and own is not None:
            self.fatal = RuntimeError(
                f"{LIMIT} steps in a row failed with the same error of this group, so training on does not help: "
                f"{type(own.error).__name__}: {own.error}"
            )
            raise self.fatal from own.error

    def raise_fatal(self) -> None:
        """Raise the error that ended training in this process, if any."""
        if self.fatal is not None:
            raise self.fatal

    def fail_group(self, reason: str) -> None:
        """Tell the other ranks of the group that it has failed, if they can be reached within a second."""
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):
            self.loop_thread.call(self.link.fail(reason), 1.0)

    def end_group(self, error: ExitWithReason) -> NoReturn:
        """Raise ``error`` now and in every later step, and report its reason as the end of the whole group."""
        self.fatal = error  # before the report, which ends the process of a group of several ranks
        self.fail_group(error.reason)
        raise error

    def check_heal(self, error: Exception) -> None:
        """End the group after ``MAX_UNFIT_HEALS`` heals in a row whose errors no further heal can repair."""
        if isinstance(error, StateMismatch):
            self.unfit_heals += 1
            if self.unfit_heals >= MAX_UNFIT_HEALS:
                self.end_group(StateMismatchExit(f"{error} (tried {self.unfit_heals} times)"))

    def tear(self, step: int = 0) -> None:
        """Mark the state as torn: this group heals from another, and no group heals from it. ``step``: of the job."""
        self.progress.tear(step)
        self.steps.write("torn", 0, 0, lineage=self.progress.lineage)

    def diverge(self) -> None:
        """Mark the weights as different from the cohort's: no group heals from this one until it has healed."""
        self.log.error("weights differ from those of the other groups", step=self.progress.step)
        self.progress.diverge()
        self.steps.write("diverged", self.progress.step, 0, lineage=self.progress.lineage)
