"""Shards of a job whose model exists once: worlds that its members form, and members without copies. Pure."""

from __future__ import annotations

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.views import reasons
from keepstep_mesh.protocol.membership import Data
from keepstep_mesh.protocol.messages import ShardReport

LOST = "lost"


class Shards:
    """Notes the reports of the groups. Each world is logged once, by its first report."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._world = 0
        """The newest world that was logged."""

    def reported(self, group: Group, told: ShardReport) -> None:
        """The group reports its shards."""
        before, group.shards = group.shards, told
        if told.formed and told.world > self._world:
            self._world = told.world
            self._log_world(told)
        was = before.exposed if before is not None else ()
        if told.exposed and {hole.keeper for hole in told.exposed} != {hole.keeper for hole in was}:
            self._job.log("exposed", group.replica_id, reason=reasons.no_copies(told))
        if was and not told.exposed:
            self._job.log("covered", group.replica_id, keepers=", ".join(told.keepers))

    def _log_world(self, told: ShardReport) -> None:
        if told.how == LOST:
            self._job.log("shards_lost", "", step=told.step, went_back=told.went_back)
            return
        facts: dict[str, Data] = {"how": told.how, "ranks": told.ranks, "step": told.step}
        if told.former_ranks not in (0, told.ranks):
            facts["former_ranks"] = told.former_ranks
        facts["seconds"] = round(told.seconds, 3)
        if told.went_back:
            facts["went_back"] = told.went_back
        self._job.log("world_formed", "", **facts)
