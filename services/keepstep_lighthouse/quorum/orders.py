"""Orders of an administrator: evict, readmit, change the policy. Pure.

An order is written before a group hears of it, and logged with its author. ``target`` is a stable name or one
incarnation. Other features have orders of their own: ``JobState.drain``, ``Spares``, ``Verification``, ``Finishing``.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep_lighthouse.quorum.events import EvictOrdered, PolicyOrdered, ReadmitOrdered
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import bans
from keepstep_lighthouse.quorum.presence.departures import EVICTED, Departures
from keepstep_lighthouse.quorum.presence.health import Health
from keepstep_lighthouse.quorum.probation.probation import Probation
from keepstep_lighthouse.quorum.takeover import Takeover
from keepstep_mesh.protocol.messages import Evicted
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.policy import policy_changes, policy_problem


class Orders:
    def __init__(
        self, job: JobState, takeover: Takeover, probation: Probation, departures: Departures, health: Health
    ) -> None:
        self._job, self._takeover, self._probation = job, takeover, probation
        self._departures, self._health = departures, health

    def evict(self, order: EvictOrdered, now: float, now_unix: float) -> None:
        """Evict the target, even if the lighthouse does not know it or still waits for it after a takeover."""
        found = self._job.groups.matching(order.target)
        absent = [one for one in sorted(self._takeover.absent) if order.target in (one, name_of(one))]
        incarnations = [group.replica_id for group in found] + absent
        if not incarnations and ":" in order.target:
            incarnations = [order.target]
        if not incarnations and order.ban_seconds <= 0:
            return
        self._departures.expect_no_longer(name_of(order.target))  # no group waits for its return
        record = bans.evict(self._job.record, incarnations, order, now_unix)
        self._job.persist(record)
        self._job.log(
            "evicted",
            order.target,
            reason=order.reason,
            by=order.by,
            ban_seconds=order.ban_seconds,
            incarnations=[*incarnations],
            quorum_id=record.quorum_id,
        )
        for group in found:
            if group.session is not None:
                self._job.tell(group.session, Evicted(order.reason, order.ban_seconds))
                self._job.end(group.session)
            self._departures.lose(group, f"evicted by {order.by}: {order.reason}", now, EVICTED)
            self._departures.expect_no_longer(group.name)
            self._probation.forgive(group.name, "it was evicted")
        for replica_id in absent:
            self._departures.give_up_absent(replica_id, f"evicted by {order.by}: {order.reason}", now, EVICTED)
            self._departures.expect_no_longer(name_of(replica_id))
            self._takeover.no_longer_absent(replica_id, now)

    def readmit(self, order: ReadmitOrdered, now_unix: float) -> None:
        """Lift bans and evictions of the target, and end its probation. No effect without any."""
        record = bans.readmit(self._job.record, order.target, now_unix)
        parted = [name for name in (order.target, name_of(order.target)) if name in self._probation.partings.groups]
        if record != self._job.record or parted:
            # logged first: if the lighthouse is killed in between, the log still explains why the group returns
            self._job.log("readmitted", order.target, by=order.by, quorum_id=record.quorum_id)
        if record != self._job.record:
            self._job.persist(record)
        for name in parted:
            self._probation.forgive(name, f"{order.by} readmitted it")

    def change_policy(self, order: PolicyOrdered, now: float) -> None:
        """Change the policy. No effect if it is invalid or the same."""
        old, policy = self._job.record.policy, order.policy
        if policy == old or policy_problem(policy) is not None:
            return
        self._job.persist(replace(self._job.record, policy=policy))
        names = policy_changes(old, policy)
        changed, before = ({name: getattr(one, name) for name in names} for one in (policy, old))
        self._job.log("policy", "", by=order.by, changed=changed, before=before, quorum_id=self._job.record.quorum_id)
        if policy.heartbeat_timeout < old.heartbeat_timeout:
            self._health.heartbeats_faster(now)
        if self._takeover.until is not None:
            self._takeover.change_grace()

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        evicted = self._job.record.evicted
        assert not set(self._job.groups.by_id) & set(evicted), "an evicted group is among the healthy"
        assert len(evicted) <= bans.MAX_EVICTED, "evicted incarnations pile up"
