"""Shards of a job whose model exists once: worlds that its members form, and members without copies. Pure.

Each member tells its keepers, those of them that have no copies, and the members of which it has copies itself: after
a takeover these may not come back to tell. A shard can be had of its member and of the keepers that have copies
(``groups.sources``). Rules:

* No quorum forms without all groups that have a shard, as long as one of them is there, also if it hangs: the others
  could not go on. Those that were lost by their silence, or did not reconnect after a takeover, may live behind a
  broken network: they have ``join_timeout`` to come back, and so have those that only others named, after a quorum
  without them. Then the quorum forms, and its members find that the shard is lost.
* ``max_replicas`` and ``QuorumRequest.multiple`` leave out no group that alone has a shard, so a job may shrink in
  several quorums.
* Groups that drain get the order one after the other, if together they would take a shard with them: the next one
  when the others have formed a world without the first. An eviction does not wait.
"""

from __future__ import annotations

from collections.abc import Collection

from keepstep_lighthouse.quorum.forming.quorum_rules import Verdict, choose, surplus
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.views import reasons
from keepstep_mesh.protocol.lineage import worth
from keepstep_mesh.protocol.membership import Data
from keepstep_mesh.protocol.messages import ShardReport
from keepstep_mesh.protocol.names import name_of

LOST = "lost"


class Shards:
    """Notes the reports of the groups. Each world is logged once, by its first report."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._world = self._logged = 0
        """The newest world of which a group has told, and the newest that was logged."""

    def reported(self, group: Group, told: ShardReport, now: float) -> None:
        """The group reports its shards."""
        before, group.shards = group.shards, told
        record, sources = self._job.record, self._job.groups.sources
        if told.world > self._world:
            self._world = told.world
            sources.begin(record.members if record.quorum_id == told.world else ())
        if told.world == self._world and told.how != LOST:
            without = {hole.keeper for hole in told.exposed}
            has = [one for one in told.keepers if one not in without]
            sources.told(group.replica_id, has, told.keeps)
            if record.quorum_id != told.world:  # its members are known from the reports only
                for other in {*has, *told.keeps} - self._job.groups.by_id.keys():
                    sources.silenced(other, now)
        if told.formed and told.world > self._logged:
            self._logged = told.world
            self._log_world(told)
        was = before.exposed if before is not None else ()
        if told.exposed and {hole.keeper for hole in told.exposed} != {hole.keeper for hole in was}:
            self._job.log("exposed", group.replica_id, reason=reasons.no_copies(told))
        if was and not told.exposed:
            self._job.log("covered", group.replica_id, keepers=", ".join(told.keepers))

    def waits(self, now: float) -> Verdict | None:
        """Return the verdict if the quorum that is due would lose shards, or not fit the mesh; None: it may form."""
        groups = self._job.groups
        if not groups.sources:
            return None
        chosen = choose(groups, self._job.record)
        kept = {one.replica_id for one in chosen}
        if surplus(len(chosen), groups) or any(groups.sources.lost_without(kept, groups.by_id)):
            return Verdict("shards")
        unheard = {one: at for one, at in groups.sources.unheard.items() if name_of(one) not in groups.by_name}
        first_asked = groups.first_asked()
        needed = [unheard[one] for one in groups.sources.lost_without(kept, unheard)]
        if first_asked is not None and needed:
            until = max(first_asked, *needed) + self._job.record.policy.join_timeout
            return Verdict("shards", until) if now < until else None
        return None

    def complete_without(self, names: Collection[str]) -> bool:
        """Return whether the other groups that ask have all shards of the newest state. True for other jobs."""
        groups = self._job.groups
        if not groups.sources:
            return True
        asking = groups.all_asking()
        kept = [one for one in asking if one.name not in names]
        if any(groups.sources.lost_without({one.replica_id for one in kept}, groups.by_id)):
            return False
        newest = max(map(worth, asking), default=None)
        return any(worth(one) == newest for one in kept)

    def let_leave(self) -> None:
        """Send the orders to drain that have waited, if shards can be had without these groups now."""
        for group in list(self._job.leaving_later.values()):
            if group.replica_id in self._job.groups.by_id:
                self._job.tell_to_leave(group)
            else:
                del self._job.leaving_later[group.replica_id]

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
