"""Log entries of a heal: its beginning and its end. Pure."""

from __future__ import annotations

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_mesh.protocol.membership import Data
from keepstep_mesh.protocol.messages import Healing


def progressed(job: JobState, group: Group, told: Healing, now: float) -> None:
    """The group reports the progress of its heal."""
    before = group.heal
    job.groups.heals.report(group, told, now)
    if group.heal is None or group.heal.progress is not told:
        return
    if before is None:
        job.log("heal_began", group.replica_id, step=told.step, source=told.source)
    if told.ended:
        _log_end(job, group, told, told.error)


def end(job: JobState, group: Group, error: str) -> None:
    """The heal is over; the group may not have reported that."""
    if (progress := group.heal_progress) is not None:
        _log_end(job, group, progress, error)


def _log_end(job: JobState, group: Group, told: Healing, error: str) -> None:
    facts: dict[str, Data] = {"step": told.step, "source": told.source, "via": told.via, "bytes": told.bytes_done}
    facts["seconds"] = round(told.seconds, 3)
    facts["bytes_per_second"] = round(told.bytes_done / told.seconds) if told.seconds > 0 else 0
    if error:
        job.log("heal_failed", group.replica_id, **facts, reason=error)
    else:
        job.log("healed", group.replica_id, **facts)
