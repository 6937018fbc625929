"""A JobCore with its own clock and sessions by replica_id. ``validate`` runs after every event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keepstep_lighthouse.quorum.events import (
    Announce,
    Asked,
    Cancelled,
    Closed,
    Decision,
    DrainOrdered,
    EndSession,
    Event,
    EvictOrdered,
    GroupFailed,
    HealProgress,
    Heard,
    LeftOnPurpose,
    LogEntry,
    MovedAway,
    Opened,
    Persist,
    PolicyOrdered,
    PortAnswered,
    PortRefused,
    ReadmitOrdered,
    ReopenOrdered,
    ReplaceOrdered,
    ShardsReported,
    StacksReported,
    StragglerFound,
    Tell,
    Tick,
    VerifyOrdered,
)
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.machine import JobCore
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.protocol.membership import HeldAnswer, Lineage, MemberInfo, StateRoot, StepFailure, StepReport
from keepstep_mesh.protocol.messages import Exposure, Healing, QuorumRequest, ShardReport, ToWorker
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.protocol.stack_messages import RankStacks

BEAT_SECONDS = 0.5
UNIX_AT_START = 1_000_000.0


class Driver:
    """Drive a JobCore: each method feeds one event and returns the decisions.

    Without a policy that says so, no group is asked for its stacks.
    """

    def __init__(self, policy: Policy | None = None, record: JobRecord | None = None, **limits: Any) -> None:
        self.now = 100.0
        self.record = record or JobRecord(policy=policy or Policy(**{"hang_after": 0.0, **limits}))
        self.core = JobCore("job", self.record, self.now, self.unix, restarted=False)
        self.session_of: dict[str, int] = {}
        self.replica_of: dict[int, str] = {}
        self.requests: dict[str, int] = {}
        self.log: list[LogEntry] = []
        self.validates = True
        """Set it to False for thousands of groups."""

    @property
    def unix(self) -> float:
        return UNIX_AT_START + self.now

    def feed(self, event: Event) -> list[Decision]:
        decisions = self.core.handle(event, self.now, self.unix)
        if self.validates:
            self.core.validate()
        for decision in decisions:
            match decision:
                case Persist(record):
                    self.record = record
                case EndSession(session):
                    replica_id = self.replica_of[session]
                    if self.session_of.get(replica_id) == session:
                        del self.session_of[replica_id]
                case LogEntry():
                    self.log.append(decision)
                case Announce():
                    assert decision.quorum_id == self.record.quorum_id, "announced what is not written"
                    assert {m.replica_id for m in decision.members} == set(self.record.members)
                    if len(decision.to) == len(decision.listed):  # else an answer that is given again
                        groups = self.core._groups.by_id
                        settings = {groups[m.replica_id].settings for m in decision.listed} - {""}
                        assert len(settings) <= 1, "groups with different settings train"
                case _:
                    pass
        return decisions

    def restart(self, fenced_until: float = 0.0) -> None:
        """Replace the lighthouse by one that starts from the stored record, without sessions.

        ``fenced_until``: time until which the old one may be alive.
        """
        self.session_of.clear()
        self.core = JobCore("job", self.record, self.now, self.unix, restarted=True, fenced_until=fenced_until)

    # ---- groups

    def opens(
        self,
        replica_id: str,
        *,
        seen: int = 0,
        held: HeldAnswer | None = None,
        groups: int = 0,
        host: str = "",
        standby: bool = False,
        local: bool = False,
    ) -> list[Decision]:
        session = len(self.replica_of) + 1
        self.replica_of[session] = replica_id
        self.session_of[replica_id] = session
        return self.feed(Opened(session, replica_id, seen, held, groups, host, standby, local))

    def open_all(self, *replica_ids: str) -> None:
        for replica_id in replica_ids:
            self.opens(replica_id)

    def asks(
        self,
        replica_id: str,
        step: int = 0,
        lineage: Lineage = "",
        *,
        failures: int = 0,
        shrink: bool = False,
        request: int | None = None,
        timeout: float = 600.0,
        info: MemberInfo | None = None,
        root: StateRoot | None = None,
        allow_heal: bool = True,
        settings: str | None = None,
        last_step: StepReport | None = None,
        min_groups: int = 0,
        grace: float = 0.0,
        final: bool = False,
        durable_relays: tuple[str, ...] = (),
        failure: StepFailure | None = None,
        retry: bool = False,
        replace: str = "",
        publish: str = "",
        multiple: int = 1,
    ) -> list[Decision]:
        if settings is not None and info is None:
            info = MemberInfo(f"http://{replica_id}")
        number = self.requests.get(replica_id, 0) + 1 if request is None else request
        self.requests[replica_id] = max(number, self.requests.get(replica_id, 0))
        limit = int(timeout * 1000)
        wanted = QuorumRequest(
            *(number, step, lineage, shrink, failures, limit, info, root),
            allow_heal=allow_heal,
            settings=settings or "",
            last_step=last_step,
            min_groups=min_groups,
            grace_ms=round(grace * 1000),
            final=final,
            durable_relays=durable_relays,
            failure=failure,
            retry=retry,
            replace=replace,
            publish=publish,
            multiple=multiple,
        )
        return self.feed(Asked(self.session_of[replica_id], wanted))

    def all_ask(
        self, replica_ids: Iterable[str], step: int = 0, lineage: Lineage = "", failures: int = 0
    ) -> list[Decision]:
        decisions: list[Decision] = []
        for replica_id in replica_ids:
            decisions += self.asks(replica_id, step, lineage, failures=failures)
        return decisions

    def start(self, *replica_ids: str) -> Announce:
        """Open a session for each, and let them get their first quorum."""
        self.open_all(*replica_ids)
        return announced(self.all_ask(replica_ids))

    def cancels(self, replica_id: str, request: int | None = None) -> list[Decision]:
        number = self.requests[replica_id] if request is None else request
        return self.feed(Cancelled(self.session_of[replica_id], number))

    def closes(self, replica_id: str) -> list[Decision]:
        return self.feed(Closed(self.session_of.pop(replica_id)))

    def beats(self, replica_id: str) -> list[Decision]:
        return self.feed(Heard(self.session_of[replica_id]))

    def heals(self, replica_id: str, done: int = 1, total: int = 100, rate: float = 1.0) -> list[Decision]:
        return self.reports(replica_id, Healing(done, total, rate))

    def reports(self, replica_id: str, told: Healing) -> list[Decision]:
        return self.feed(HealProgress(self.session_of[replica_id], told))

    def tells_shards(
        self,
        replica_id: str,
        world: int,
        keepers: tuple[str, ...] = (),
        *,
        without: tuple[str, ...] = (),
        keeps: tuple[str, ...] = (),
    ) -> list[Decision]:
        """Report the shards of a member of ``world``.

        Args:
            keepers: groups that keep copies of it, or should.
            without: those of them that have no copies.
            keeps: groups of which it has copies.
        """
        exposed = tuple(Exposure(one, "they are on their way") for one in without)
        report = ShardReport(world, 0, 0, 0, "replaced", 0, 0.1, 0, keepers, exposed, formed=True, keeps=keeps)
        return self.feed(ShardsReported(self.session_of[replica_id], report))

    def stacks(self, replica_id: str, found: RankStacks) -> list[Decision]:
        """Answer a request for the stacks of a rank."""
        return self.feed(StacksReported(self.session_of[replica_id], found))

    def leaves(
        self, replica_id: str, reason: str = "told to", *, cause: str = "", step: int | None = None
    ) -> list[Decision]:
        return self.feed(LeftOnPurpose(self.session_of[replica_id], reason, cause, step))

    def moves(self, replica_id: str) -> list[Decision]:
        return self.feed(MovedAway(self.session_of[replica_id]))

    def fails(self, replica_id: str, reason: str = "a rank died") -> list[Decision]:
        return self.feed(GroupFailed(self.session_of[replica_id], reason))

    def port_answers(self, replica_id: str) -> list[Decision]:
        return self.feed(PortAnswered(self.session_of[replica_id]))

    def port_refuses(self, replica_id: str, session: int | None = None) -> list[Decision]:
        """``session``: the one that ended; None: the last one of the group."""
        last = max(number for number, one in self.replica_of.items() if one == replica_id)
        return self.feed(PortRefused(last if session is None else session, replica_id))

    # ---- people

    def evicts(self, target: str, ban_seconds: float = 0, reason: str = "bad disk") -> list[Decision]:
        return self.feed(EvictOrdered(target, reason, ban_seconds, "ann"))

    def drains(self, target: str, reason: str = "maintenance") -> list[Decision]:
        return self.feed(DrainOrdered(target, reason, "ann"))

    def replaces(self, target: str, reason: str = "bad fan") -> list[Decision]:
        return self.feed(ReplaceOrdered(target, reason, "ann"))

    def readmits(self, target: str) -> list[Decision]:
        return self.feed(ReadmitOrdered(target, "ann"))

    def sets_policy(self, policy: Policy) -> list[Decision]:
        return self.feed(PolicyOrdered(policy, "ann"))

    def finds_straggler(self, replica_id: str, steps: int) -> list[Decision]:
        """Report a straggler, as the metrics service does."""
        return self.feed(StragglerFound(replica_id, steps, 0.5, 0.1, "metrics"))

    def reopens(self) -> list[Decision]:
        return self.feed(ReopenOrdered("ann"))

    def wants_comparison(self) -> list[Decision]:
        return self.feed(VerifyOrdered("ann"))

    # ---- time

    def tick(self) -> list[Decision]:
        return self.feed(Tick())

    def passes(self, seconds: float, *, silent: Iterable[str] | None = ()) -> list[Decision]:
        """Advance the time. Sessions send heartbeats, except those of ``silent`` (None: all). Ticks come when due."""
        end = self.now + seconds + 1e-9  # so that 0.1 s twice is at least 0.2 s
        decisions: list[Decision] = []
        next_beat = (self.now // BEAT_SECONDS + 1) * BEAT_SECONDS
        while True:
            deadline = self.core.deadline()
            upcoming = min(end, next_beat, end if deadline is None else deadline)
            self.now = max(self.now, upcoming)
            if deadline is not None and deadline <= self.now:
                decisions += self.tick()
            elif self.now >= end:
                return decisions
            if self.now >= next_beat:
                next_beat += BEAT_SECONDS
                for replica_id, session in self.session_of.items():
                    if silent is not None and replica_id not in silent:
                        self.feed(Heard(session))


def announced(decisions: Iterable[Decision]) -> Announce:
    """Return the only announcement among ``decisions``."""
    (announce,) = [decision for decision in decisions if isinstance(decision, Announce)]
    return announce


def announces(decisions: Iterable[Decision]) -> bool:
    return any(isinstance(decision, Announce) for decision in decisions)


def members(announce: Announce) -> list[str]:
    return [member.replica_id for member in announce.members]


def told(driver: Driver, decisions: Iterable[Decision]) -> dict[str, list[ToWorker]]:
    """Group messages by the replica_id of the receiver."""
    messages: dict[str, list[ToWorker]] = {}
    for decision in decisions:
        if isinstance(decision, Tell):
            for session in decision.to:
                messages.setdefault(driver.replica_of[session], []).append(decision.message)
    return messages


def logged(decisions: Iterable[Decision]) -> list[tuple[str, str]]:
    return [(decision.kind, decision.replica_id) for decision in decisions if isinstance(decision, LogEntry)]


def states(driver: Driver) -> dict[str, ReplicaState]:
    """Return the state of every group by its replica_id."""
    return {view.replica_id: view.state for view in driver.core.replicas(driver.now)}
