"""State that the parts of a job's state machine share, and the decisions for the current event. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from keepstep_lighthouse.quorum.agreement.step_reports import StepReports
from keepstep_lighthouse.quorum.events import Decision, EndSession, LogEntry, Persist, Tell
from keepstep_lighthouse.quorum.forming.announcing import Announcer
from keepstep_lighthouse.quorum.forming.rounds import Round
from keepstep_lighthouse.quorum.groups.all_groups import Groups
from keepstep_lighthouse.quorum.groups.group import Exclusion, Group
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.policies import policy_problem
from keepstep_lighthouse.quorum.presence import bans
from keepstep_lighthouse.quorum.probation.evidence import Evidence
from keepstep_lighthouse.quorum.probation.parted import Probation
from keepstep_lighthouse.quorum.takeover import Takeover
from keepstep_lighthouse.quorum.views.replicas import Gone
from keepstep_mesh.protocol.lineage import is_torn
from keepstep_mesh.protocol.membership import Data
from keepstep_mesh.protocol.messages import ToWorker
from keepstep_mesh.protocol.names import name_of

MAX_FORMER_MEMBERS = 4000
"""Number of names of former members that are kept."""


class JobState:
    def __init__(self, record: JobRecord, now: float, now_unix: float) -> None:
        self.record = record
        """Includes pending writes; ``persist`` changes it."""
        self.members = frozenset(record.members)
        self.groups = Groups()
        self.gone = Gone()
        self.round = Round()
        self.takeover = Takeover()
        self.announcer = Announcer()
        self.reports = StepReports()
        self.evidence = Evidence()
        self.probation = Probation()
        self.proven: list[Group] = []
        """Members of the last quorum that committed a step, as far as this lighthouse knows."""
        self.settings = self.layout = ""
        """Those of the last quorum whose members know theirs."""
        self.compared = True
        """False: a request differs from them, and no member of the quorum can judge it."""
        self.active_since = now_unix
        """When the first group came, or the first quorum formed after a long wait; Unix seconds."""
        self.reached = max(record.step, record.finished_step)
        """Highest step that the groups are known to have committed."""
        self.last_gone: tuple[str, str] | None = None
        """The group that went last: what follows for the job (``JobEnd.code``), and why it went."""
        self.dismissed: frozenset[str] | None = None
        """Spares that were there when the last group that had trained left on purpose; None: it did not."""
        self.were_members = dict.fromkeys(map(name_of, record.members))
        """Names of the groups that were in a quorum, as far as this lighthouse knows, in this order."""
        self.lost_at: dict[str, float] = {}
        """When groups were lost, by name; see ``presence.losses``."""
        self.lost_by_port: dict[str, None] = {}
        """Incarnations that were lost because their port was closed, in this order; ``presence.ports``."""
        self.ports_mislead = False
        """One of them returned."""
        self.final_heals: Counter[str] = Counter()
        """Finishing quorums in which groups were behind, by name."""
        self.awake_since = now
        """No group is judged before this time."""
        self.beats_counted_from = now
        """When the heartbeat timeout last became shorter: before, workers had a longer heartbeat interval."""
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

    # ---- the members of the quorum

    def set_members(self, members: list[Group]) -> None:
        self.groups.set_members(self.record.members, members)
        self.members = frozenset(group.replica_id for group in members)
        names = [*self.were_members, *(group.name for group in members)]
        self.were_members = dict.fromkeys(names[-MAX_FORMER_MEMBERS:])

    def member_sessions(self, which: Callable[[Group], bool]) -> tuple[int, ...]:
        known = (self.groups.by_id.get(replica_id) for replica_id in self.record.members)
        return tuple([g.session for g in known if g is not None and g.session is not None and which(g)])

    # ---- the grace of a takeover

    @property
    def takeover_grace(self) -> float:
        policy = self.record.policy
        return policy.heartbeat_timeout if policy.takeover_grace is None else policy.takeover_grace

    def no_longer_absent(self, replica_id: str, now: float) -> None:
        """The member reconnected, or is lost."""
        self.takeover.absent.discard(replica_id)
        self.end_grace_of_all(now)

    def end_grace_of_all(self, now: float) -> None:
        """End the grace if no member is absent, unless one of them still has to send a frame."""
        if self.takeover.until is not None and not self.takeover.absent and not self.takeover.fenced:
            self.end_grace(now)

    def end_grace(self, now: float) -> None:
        """Judge silent and suspect groups from the next tick on, and measure the join timeout from now."""
        self.takeover.end_grace()
        self.awake_since = now
        self.groups.clock_starts(now)

    # ---- invariants

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        record, groups = self.record, self.groups
        groups.validate()
        assert list(record.members) == sorted(set(record.members)), "members of the quorum are unsorted or twice"
        assert self.members == set(record.members), "the members are not those of the record"
        assert all(g.member == (g.replica_id in self.members) for g in groups), "a group is wrongly marked as member"
        absent = self.takeover.absent
        assert not absent & set(groups.by_id), "a group that is there counts as absent"
        assert not absent or self.takeover.until is not None, "absent groups are waited for without an end"
        assert not set(groups.by_id) & set(record.evicted), "an evicted group is among the healthy"
        assert policy_problem(record.policy) is None, "the policy cannot be used"
        assert record.closed is None or not groups.asking_count, "a group waits for a quorum of a closed job"
        assert len(self.round.lost) <= len(record.members) + 1, "losses pile up"
        assert self.round.reports <= self.members, "a stranger reports a quorum broken"
        assert len(record.evicted) <= bans.MAX_EVICTED, "evicted incarnations pile up"
        assert all(self.probation.is_out(g.name) for g in groups if g.is_excluded(Exclusion.PARTED)), (
            "a group is kept out without a reason"
        )
        assert all(g.session is not None for g in (*groups.asking.values(), *groups.passed_over.values())), (
            "a group asks without a session"
        )
        assert not any(g.diverged and is_torn(g.lineage) for g in groups), "a torn group counts as a whole one"
