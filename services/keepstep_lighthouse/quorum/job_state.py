"""State of a job that several features share, and the decisions for the current event. Pure.

State that only one feature needs is in the room of that feature; ``features`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep_lighthouse.quorum.events import Announce, Decision, EndSession, LogEntry, Persist, Tell
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.groups.groups import Groups
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.lineage import is_torn
from keepstep_mesh.protocol.membership import Data
from keepstep_mesh.protocol.messages import Denied, Drain, RoundBroken, ToWorker
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.policy import policy_problem

MAX_FORMER_MEMBERS = 4000
"""Number of names of former members that are kept."""


@dataclass(slots=True, eq=False)
class Round:
    """Events of the current quorum since it was last announced."""

    number: int = 0
    """Counts the announced quorums."""
    began: float | None = None
    """When this one was announced; None: by another lighthouse."""
    lost: dict[str, str] = field(default_factory=dict)
    """Members that were lost, with the reason."""
    reports: set[str] = field(default_factory=set)
    """Members that left, were lost, or asked again after a failed commit."""
    broken: bool = False
    """Not all members can complete the answer; the members at work have been notified."""
    left: tuple[float, Group] | None = None
    """The first member that left, and when."""

    def is_given_up_by_most(self, replica_id: str, members: int) -> bool:
        """Return whether more than half of the other members reported the round as broken, or left."""
        return 2 * (len(self.reports) - (replica_id in self.reports)) > members - 1


class JobState:
    def __init__(self, record: JobRecord, now_unix: float) -> None:
        self.record = record
        """Includes pending writes; ``persist`` changes it."""
        self.members = frozenset(record.members)
        self.were_members = dict.fromkeys(map(name_of, record.members))
        """Names of the groups that were in a quorum, as far as this lighthouse knows, in this order."""
        self.groups = Groups()
        self.round = Round()
        self.last: Announce | None = None
        """The last quorum that this lighthouse announced."""
        self.proven: list[Group] = []
        """Members of the last quorum that committed a step, as far as this lighthouse knows."""
        self.reached = max(record.step, record.finished_step)
        """Highest step that the groups are known to have committed."""
        self.leaving_later: dict[str, Group] = {}
        """Groups whose order to drain waits."""
        self.active_since = now_unix
        """When the first group came, or the first quorum formed after a long wait; Unix seconds."""
        self.decisions: list[Decision] = []
        """Decisions for the current event, in order."""

    @property
    def finished_step(self) -> int:
        """The highest step at which a group finished, unless the job went beyond it; 0: none."""
        finished = self.record.finished_step
        return finished if finished >= self.reached else 0

    # ---- decisions

    def tell(self, session: int, message: ToWorker) -> None:
        self.decisions.append(Tell((session,), message))

    def tell_all(self, sessions: tuple[int, ...], message: ToWorker) -> None:
        self.decisions.append(Tell(sessions, message))

    def end(self, session: int) -> None:
        self.decisions.append(EndSession(session))

    def persist(self, record: JobRecord) -> None:
        self.record = record
        self.decisions.append(Persist(record))

    def log(self, kind: str, replica_id: str, **detail: Data) -> None:
        self.decisions.append(LogEntry(kind, replica_id, detail))

    def drain(self, target: str, reason: str, by: str) -> None:
        """Ask the groups that ``target`` names to leave; a disconnected group is asked when it reconnects."""
        for group in self.groups.matching(target):
            group.draining, group.drained_by = reason, by
            self.tell_to_leave(group)
            self.log("drain", group.replica_id, reason=reason, by=by)

    def tell_to_leave(self, group: Group) -> None:
        """Send a group its order to drain; later, if a shard would be lost to the groups that stay (``shards``)."""
        assert group.draining is not None
        stay = {one.replica_id for one in self.groups if one.member and not one.told_to_leave}
        waits = len(stay) > 1 and group.replica_id in stay and self.groups.sources.needs(group.replica_id, stay)
        self.leaving_later.pop(group.replica_id, None)
        if waits:
            self.leaving_later[group.replica_id] = group
        elif group.session is not None:
            group.told_to_leave = True
            self.tell(group.session, Drain(group.draining))

    def deny(self, group: Group, code: str, why: str, *, logged: bool = True) -> None:
        """Withdraw the open request of a group, if it has one, and tell it why."""
        request = group.request
        self.groups.withdraw(group)
        if request is not None and group.session is not None:
            self.tell(group.session, Denied(request.request, code, why))
            if logged:
                self.log("denied", group.replica_id, code=code, reason=why)

    # ---- the members of the quorum

    def set_members(self, members: list[Group]) -> None:
        self.groups.set_members(self.record.members, members)
        self.members = frozenset(group.replica_id for group in members)
        names = [*self.were_members, *(group.name for group in members)]
        self.were_members = dict.fromkeys(names[-MAX_FORMER_MEMBERS:])

    def member_sessions(self, which: Callable[[Group], bool]) -> tuple[int, ...]:
        known = (self.groups.by_id.get(replica_id) for replica_id in self.record.members)
        return tuple([g.session for g in known if g is not None and g.session is not None and which(g)])

    def break_round(self, reason: str, without: Group) -> None:
        """Send ``RoundBroken``: ``without`` has no answer of the last round, so the others cannot complete it."""
        if self.round.broken:
            return
        self.round.broken = True
        sessions = self.member_sessions(lambda group: group.request is None and group is not without)
        if sessions:
            self.tell_all(sessions, RoundBroken(self.record.quorum_id, reason))
            self.log("round_broken", without.replica_id, reason=reason)

    # ---- invariants

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        record, groups, last = self.record, self.groups, self.last
        groups.validate()
        assert list(record.members) == sorted(set(record.members)), "members of the quorum are unsorted or twice"
        assert self.members == set(record.members), "the members are not those of the record"
        assert all(g.member == (g.replica_id in self.members) for g in groups), "a group is wrongly marked as member"
        assert policy_problem(record.policy) is None, "the policy cannot be used"
        assert record.closed is None or not groups.asking_count, "a group waits for a quorum of a closed job"
        assert len(self.round.lost) <= len(record.members) + 1, "losses pile up"
        assert self.round.reports <= self.members, "a stranger reports a quorum broken"
        assert all(g.session is not None for g in (*groups.asking.values(), *groups.passed_over.values())), (
            "a group asks without a session"
        )
        assert not any(g.diverged and is_torn(g.lineage) for g in groups), "a torn group counts as a whole one"
        if last is not None:
            assert last.listed, "an empty quorum was announced"
            assert len({one.info.layout for one in last.listed} - {""}) <= 1, "groups with different layouts train"
            assert last.quorum_id <= record.quorum_id, "a quorum was announced that is not in the record"
