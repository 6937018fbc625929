"""The objects and values that all steps of this process share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.group.group_link import LinkSettings
from keepstep.group.quorum_plan import WorldSizeMode
from keepstep.group.rank_link import RankLink
from keepstep.runtime.loop_thread import LoopThread
from keepstep.step.live_state import LiveState
from keepstep.step.progress import GroupProgress
from keepstep.step.reconfigurer import Reconfigurer
from keepstep.step.step_log import StepLog
from keepstep.step.step_telemetry import StepTelemetry
from keepstep_mesh.config.logging import Logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import StateRoot


@dataclass(slots=True)
class StepContext:
    """Shared by the Manager and all its attempts."""

    mesh: LoopThread
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
    min_replica_size: int
    world_size_mode: WorldSizeMode
    fatal: BaseException | None = None
    """The error that ended training in this process; every later step raises it."""
    job_settings: str = ""
    """The settings that decide this group's arithmetic; those of all groups must be equal."""
    layout: list[str] = field(default_factory=list)
    """The parameters and buckets of this rank, one line each."""
    root: StateRoot | None = None
    """The root digest to send with the next request, because the lighthouse asked for it."""
    leaving: str = ""
    """Why this group is about to leave the job; empty while it is not."""
    late_heals: int = 0
    """Number of heals in a row that ran out of time; each one doubles the time of the next."""

    def end_with(self, error: BaseException) -> NoReturn:
        """Raise ``error`` now and in every later step."""
        self.fatal = error
        raise error

    def raise_fatal(self) -> None:
        """Raise the error that ended training here, if there was one."""
        if self.fatal is not None:
            raise self.fatal

    def fail_group(self, reason: str) -> None:
        """Tell the other ranks of the group that it has failed, if they can be reached within a second."""
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):
            self.mesh.call(self.link.fail(reason), 1.0)

    def tear(self) -> None:
        """Mark the state as torn: this group heals from another, and no group heals from it."""
        self.progress.tear()
        self.steps.write("torn", 0, 0, lineage=self.progress.lineage)

    def diverge(self) -> None:
        """Mark the weights as different from the cohort's: no group heals from this one until it has healed."""
        self.log.error("weights differ from those of the other groups", step=self.progress.step)
        self.progress.diverge()
        self.steps.write("diverged", self.progress.step, 0, lineage=self.progress.lineage)
