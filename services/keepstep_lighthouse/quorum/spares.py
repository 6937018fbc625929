"""Spares: groups that are ready to train, and wait until the job has fewer groups than it should have. Pure.

A group that may stand by (``Hello.standby``) is a spare until it is let in. It is connected, does not count, and no
group waits for it. From then on it is a group like any other, until its process ends. Rules:

* A spare is let in when it asks and the job has fewer groups than it should have (``full_count``): at the start the
  first ones that ask, later after a loss. The spare with the newest state comes first, then the one that arrived first.
* A group with an order to replace it counts as missing, and stays. When so many others have committed a step that the
  job has all its groups without it, it is drained: it leaves between two steps, and no step is lost. The order is
  stored until the group has left. A member of a job whose model exists once is drained at once: the spare takes its
  seat, with the copies of its keeper. If the group comes back as a spare, it is drained at once. A group that has to
  leave soon is drained when the spare for it is gone. If
  ``max_replicas`` has no room for the spare beside it, it is drained first. With ``max_replicas`` 1 no group would be
  left: orders are refused, and those that wait are dropped.
* Nothing is decided during the grace of a takeover, in which the groups that train may not have reconnected.
* Groups that finish are not missing. If the last group that has trained leaves on purpose, the spares leave too: alone
  they would train the whole job again. If it is lost, they go on from a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace as changed

from keepstep_lighthouse.quorum.events import ReplaceOrdered
from keepstep_lighthouse.quorum.finishing.finishing import Finishing
from keepstep_lighthouse.quorum.forming.quorum_rules import full_count
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_record import Replacement
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence.departures import FAILED, Departures
from keepstep_lighthouse.quorum.probation.probation import Probation
from keepstep_lighthouse.quorum.takeover import Takeover
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.lineage import worth

NO_SPARE = "no spare is ready"


class Spares:
    def __init__(
        self, job: JobState, takeover: Takeover, probation: Probation, departures: Departures, finishing: Finishing
    ) -> None:
        self._job, self._takeover, self._probation = job, takeover, probation
        self._departures, self._finishing = departures, finishing
        self.dismissed: frozenset[str] | None = None
        """Spares that were there when the last group that had trained left on purpose; None: it did not."""

    def settle(self, now: float) -> None:
        """Let spares in, and send spares home that are no longer needed."""
        if self._takeover.until is not None:
            return
        if self._departures.last_gone is not None or self.dismissed is not None:
            self._send_home()
        if not (self._job.groups.standing_by or self._job.record.replacing):
            return
        if self._finishes():
            return
        self._drop_old_orders()
        self._drain_spares_with_orders()
        self._let_in(now)

    def _finishes(self) -> bool:
        return bool(self._job.finished_step) and self._job.record.ended is None

    def replace(self, order: ReplaceOrdered) -> None:
        """Replace the groups that the order names. No effect on those that leave already, or do not train."""
        for group in self._job.groups.matching(order.target):
            if group.excluded is None and group.draining is None and not self._is_ordered(group):
                new = Replacement(group.replica_id, order.reason, order.by)
                self._job.persist(changed(self._job.record, replacing=(*self._job.record.replacing, new)))
                self._job.log("replace", group.replica_id, reason=order.reason, by=order.by)
                if group.shards is not None:
                    self._job.drain(group.replica_id, f"replaced: {order.reason}", order.by)

    def leaves_soon(self, group: Group, reason: str) -> None:
        """The group has to leave. Replace it, or drain it if no spare is ready, or if the one for it is gone."""
        if group.draining is not None:
            return
        if self._is_ordered(group):
            if self._is_without_spare(group):
                self._job.drain(group.replica_id, f"{reason}; {NO_SPARE}", group.name)
            return
        if (why := self.refusal(group)) is None:
            self.replace(ReplaceOrdered(group.replica_id, reason, group.name))
        else:
            self._job.drain(group.replica_id, f"{reason}; {why}", group.name)

    def refusal(self, group: Group) -> str | None:
        """Return why no spare can replace this group now, as a sentence; None: one can, or is about to."""
        if self._is_ordered(group):
            return None
        if group.stands_by:
            return f"{group.replica_id} is a spare itself"
        if group.excluded is not None:
            return f"{group.replica_id} does not train: {group.excluded.sentence or group.excluded.reason.value}"
        if group.draining is not None:
            return f"{group.replica_id} is draining already"
        if not self._ready():
            return NO_SPARE
        if self._job.record.policy.max_replicas == 1:
            return _no_room(group)
        return None

    def _is_ordered(self, group: Group) -> bool:
        return any(one.replica_id == group.replica_id for one in self._job.record.replacing)

    def _is_without_spare(self, group: Group) -> bool:
        """Return whether no spare is left for a group with an order: none is ready, and others have those that were."""
        if self._takeover.until is not None or self._ready():
            return False
        leaving = [one for one, _ in self._to_replace()]
        stay = [one for one in self._job.groups if one.excluded is None and one.draining is None and one not in leaving]
        without = full_count(self._job.groups, self._job.record.policy) - len(stay)
        return group in leaving[max(0, len(leaving) - without) :] if without > 0 else False

    def _ended_on_purpose(self) -> bool:
        """Return whether the last group that has trained left on purpose."""
        last = self._departures.last_gone
        if last is None or last[0] == FAILED or self._job.record.ended is not None:
            return False
        if not self._job.members:  # none has trained yet
            return False
        return not any(group.member for group in self._job.groups)

    def _send_home(self) -> None:
        """Let the spares leave that the end of the job leaves behind; after a stop not those that come later."""
        if not self._ended_on_purpose():
            self.dismissed = None
            return
        spares_here = [group for group in self._job.groups if group.came_as_spare]
        if self.dismissed is None or self._job.finished_step:
            self.dismissed = frozenset(group.replica_id for group in spares_here)
        step = max(self._job.reached, self._job.record.finished_step)
        how = "finished" if self._job.finished_step else "ended"
        for group in spares_here:
            if group.replica_id in self.dismissed and group.request is not None and group.draining is None:
                self._finishing.send_home(group, f"the job {how} at step {step}, and no group needs this spare")

    def _drop_old_orders(self) -> None:
        """Drop the orders for groups that have left; for all groups, if ``max_replicas`` has no room for a spare."""
        full = self._job.record.policy.max_replicas == 1
        record, here = self._job.record, self._job.groups.by_id
        replacing = tuple(one for one in record.replacing if one.replica_id in here and not full)
        if replacing == record.replacing:
            return
        waiting = self._to_replace() if full else ()
        self._job.persist(changed(record, replacing=replacing))
        for group, _ in waiting:
            self._job.log("not_replaced", group.replica_id, reason=_no_room(group))

    def _drain_spares_with_orders(self) -> None:
        """Drain the groups with an order that came back as spares, as they were not yet members: no place is lost."""
        for order in self._job.record.replacing:
            group = self._job.groups.by_id.get(order.replica_id)
            if group is not None and group.stands_by and group.draining is None:
                self._job.drain(group.replica_id, f"it stands by: {order.reason}", order.by)

    def _ready(self) -> list[Group]:
        """Return the spares that could train in the next quorum: those with the newest state first, then the oldest."""
        ready = self._job.groups.ready_spares()
        waiting = [group for group in ready if not self._probation.partings.is_out(group.name)]
        return sorted(waiting, key=worth, reverse=True)

    def _to_replace(self) -> list[tuple[Group, Replacement]]:
        """Return the groups that wait for their replacement, with the orders."""
        known = ((self._job.groups.by_id.get(one.replica_id), one) for one in self._job.record.replacing)
        return [(group, one) for group, one in known if group and group.draining is None and group.excluded is None]

    def _let_in(self, now: float) -> None:
        groups, leaving = self._job.groups, [group.replica_id for group, _ in self._to_replace()]
        target = full_count(groups, self._job.record.policy)
        most = self._job.record.policy.max_replicas or target + len(leaving)
        missing = min(target + len(leaving), most) - groups.counted
        if missing <= 0 or not groups.standing_by:
            return
        for spare in self._ready()[:missing]:
            there = groups.counted
            groups.let_in(spare, now)
            if self._job.record.quorum_id != self._job.record.first_quorum_id:
                lost = ", ".join(sorted(self._departures.expected(now)))
                why = f"{there} of {target} groups were there" + (f", without {lost}" if lost else "")
                why = f"it replaces {named(leaving)}" if there >= target else why
                self._job.log("spare_in", spare.replica_id, reason=why)
        if groups.counted >= target:
            self._departures.expect_none()  # no group waits for the return of those that were replaced

    def drain_replaced(self) -> None:
        """Drain the groups that spares have replaced, after a quorum may have been formed without some groups."""
        if self._takeover.until is not None or self._finishes() or not (waiting := self._to_replace()):
            return
        policy = self._job.record.policy
        target = full_count(self._job.groups, policy)
        least = target - 1 if policy.max_replicas == target else target  # no room for a spare before the group has left
        ready = sum(map(_trains_well, self._job.groups))
        for group, order in waiting:
            left = ready - _trains_well(group)
            if left < least:
                return
            self._job.drain(group.replica_id, f"replaced: {order.reason}", order.by)
            ready = left


def _trains_well(group: Group) -> bool:
    """Return whether the group has committed a step, holds the state of the job, and stays."""
    stays = group.member and group.excluded is None and group.draining is None
    return stays and group.committed > 0 and group.holds_newest()


def _no_room(group: Group) -> str:
    return f"max_replicas 1 has no room for a spare beside {group.replica_id}; raise it (keepstep policy)"
