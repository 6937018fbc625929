"""Events in any order that a lighthouse can meet. After each, ``validate`` holds, and what an onlooker can check."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep_lighthouse.quorum.events import Announce, Decision, EndSession, Tell
from keepstep_lighthouse.quorum.presence.health import LATE_TICK_SECONDS
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.protocol.membership import HeldAnswer, MemberInfo, StateRoot
from keepstep_mesh.protocol.messages import Denied
from keepstep_mesh.protocol.policy import SETTINGS, Policy
from tests.support.models.core_driver import Driver

GONE = ReplicaState.GONE
NAMES = st.sampled_from(["a:1", "a:2", "b:1", "b:2", "c:1", "d:1"])
TARGETS = st.sampled_from(["a", "b", "a:1", "b:2", "nobody"])


class Onlooker(RuleBasedStateMachine):
    """Keeps its own books: who has a session, which request is open, what was announced under which id."""

    @initialize(
        min_replicas=st.integers(1, 3), max_replicas=st.sampled_from([0, 0, 3, 4]), initial=st.sampled_from([0, 0, 3])
    )
    def begin(self, min_replicas: int, max_replicas: int, initial: int) -> None:
        limits = Policy(min_replicas, max_replicas, join_timeout=10, heal_timeout=4, initial_replicas=initial)
        self.driver = Driver(policy=limits)
        self.requests: dict[str, int] = {}
        self.lowest_taken: dict[str, int] = {}
        """Requests below it are of the past of that session."""
        self.memberships: dict[int, tuple[str, ...]] = {}
        self.highest = 0
        self.evicted: set[str] = set()

    def onlook(self, decisions: Sequence[Decision]) -> None:
        here = {view.replica_id for view in self.driver.core.replicas(self.driver.now) if view.state is not GONE}
        for replica_id in set(self.driver.requests) - here:
            del self.driver.requests[replica_id]  # forgotten with the group: it may count from one again
        sessions = self.driver.replica_of
        for place, decision in enumerate(decisions):
            later = decisions[place:]  # of more than one event, when time passes
            match decision:
                case Announce():
                    members = tuple(member.replica_id for member in decision.members)
                    policy = self.driver.record.policy
                    if len(decision.to) == len(members):  # else an answer that is given again
                        assert len(members) >= policy.min_replicas, "too few"
                        assert not policy.max_replicas or len(members) <= policy.max_replicas, "too many"
                    assert members == tuple(sorted(members)), "unsorted"
                    assert self.memberships.setdefault(decision.quorum_id, members) == members, "two memberships"
                    assert decision.quorum_id >= self.highest, "quorum_id went back"
                    self.highest = decision.quorum_id
                    assert not self.evicted & set(members), "an evicted member"
                    for session, request in decision.to:
                        replica_id = sessions[session]
                        open_then = self.driver.session_of.get(replica_id) == session or EndSession(session) in later
                        assert open_then, "answered a session that is over"
                        assert self.requests.pop(replica_id) == request, "answered what was not asked"
                case Tell(to, message):
                    for session in to:
                        ended = EndSession(session) in decisions
                        assert ended or self.driver.session_of.get(sessions[session]) == session, "no receiver"
                        if isinstance(message, Denied):
                            assert self.requests.pop(sessions[session]) == message.request
                case EndSession(session):
                    replica_id = sessions[session]
                    if replica_id not in self.driver.session_of:
                        self.requests.pop(replica_id, None)
                case _:
                    pass

    def connected(self, replica_id: str) -> bool:
        return replica_id in self.driver.session_of

    @rule(replica_id=NAMES, holds=st.booleans(), ahead=st.sampled_from([0, 0, 0, 0, 0, 3]), counts_anew=st.booleans())
    def opens(self, replica_id: str, holds: bool, ahead: int, counts_anew: bool) -> None:
        self.requests.pop(replica_id, None)
        if counts_anew:
            self.driver.requests.pop(replica_id, None)
        self.lowest_taken[replica_id] = 0
        seen = self.driver.record.quorum_id
        held = HeldAnswer(1, seen, 0) if holds and seen else None
        self.onlook(self.driver.opens(replica_id, seen=seen + ahead, held=held))

    @rule(
        replica_id=NAMES,
        step=st.integers(0, 3),
        failures=st.sampled_from([0, 0, 1]),
        shrink=st.sampled_from([False, False, False, True]),
        back=st.sampled_from([0, 0, 0, 1, 2]),
        timeout=st.sampled_from([600.0, 1.0, 3.0]),
        layout=st.sampled_from([None, None, "", "x", "y"]),
        root=st.sampled_from([None, "aa", "aa", "bb"]),
        sync=st.sampled_from(["", "mode sync", "mode sync", "mode async"]),
    )
    def asks(
        self,
        replica_id: str,
        step: int,
        failures: int,
        shrink: bool,
        back: int,
        timeout: float,
        layout: str | None,
        root: str | None,
        sync: str,
    ) -> None:
        if self.connected(replica_id):
            before = self.requests.get(replica_id)
            number = max(1, self.driver.requests.get(replica_id, 0) + 1 - back)
            if number >= self.lowest_taken.get(replica_id, 0):
                self.lowest_taken[replica_id] = number
                self.requests[replica_id] = number
            info = None if layout is None else MemberInfo(layout=layout)
            decisions = self.driver.asks(
                replica_id,
                step,
                failures=failures,
                shrink=shrink,
                request=number,
                timeout=timeout,
                info=info,
                settings=sync or None,
                root=None if root is None else StateRoot(max(0, step - 1), "", root),
            )
            if before is not None and any(isinstance(d, Tell) and isinstance(d.message, Denied) for d in decisions):
                self.requests[replica_id] = number
            self.onlook(decisions)

    @rule(replica_id=NAMES)
    def cancels(self, replica_id: str) -> None:
        if self.connected(replica_id) and replica_id in self.driver.requests:
            self.requests.pop(replica_id, None)
            self.onlook(self.driver.cancels(replica_id))

    @rule(replica_id=NAMES)
    def loses_its_connection(self, replica_id: str) -> None:
        if self.connected(replica_id):
            self.requests.pop(replica_id, None)
            self.onlook(self.driver.closes(replica_id))

    @rule(replica_id=NAMES)
    def heals(self, replica_id: str) -> None:
        if self.connected(replica_id):
            self.onlook(self.driver.heals(replica_id))

    @rule(replica_id=NAMES, how=st.sampled_from(["leaves", "moves", "fails"]))
    def goes(self, replica_id: str, how: str) -> None:
        if self.connected(replica_id):
            self.requests.pop(replica_id, None)
            self.onlook(getattr(self.driver, how)(replica_id))
            assert not self.connected(replica_id), "its session is ended"

    @rule(whom=TARGETS, ban_seconds=st.sampled_from([0.0, 2.0]))
    def evicts(self, whom: str, ban_seconds: float) -> None:
        decisions = self.driver.evicts(whom, ban_seconds)
        self.evicted = set(self.driver.record.evicted)
        self.onlook(decisions)

    @rule(whom=TARGETS)
    def readmits(self, whom: str) -> None:
        self.onlook(self.driver.readmits(whom))
        self.evicted = set(self.driver.record.evicted)

    @rule(whom=TARGETS)
    def drains(self, whom: str) -> None:
        self.onlook(self.driver.drains(whom))

    @rule()
    def wants_the_groups_compared(self) -> None:
        self.onlook(self.driver.wants_comparison())

    @rule(
        min_replicas=st.integers(1, 3),
        max_replicas=st.sampled_from([0, 3]),
        heartbeat_timeout=st.sampled_from([5.0, 5.0, 1.0]),
        on_divergence=st.sampled_from(SETTINGS["on_divergence"].choices),
    )
    def changes_the_policy(
        self, min_replicas: int, max_replicas: int, heartbeat_timeout: float, on_divergence: str
    ) -> None:
        policy = Policy(min_replicas, max_replicas, 0, 10.0, 4.0, heartbeat_timeout, on_divergence=on_divergence)
        self.onlook(self.driver.sets_policy(policy))

    @rule(seconds=st.sampled_from([0.1, 0.2, 1.0, 5.0, 12.0]), silent=st.sets(NAMES, max_size=2))
    def time_passes(self, seconds: float, silent: set[str]) -> None:
        self.onlook(self.driver.passes(seconds, silent=silent))

    @rule()
    def the_lighthouse_sleeps(self) -> None:
        self.driver.now += 6
        self.onlook(self.driver.tick())

    @precondition(lambda self: self.driver.record.quorum_id)
    @rule()
    def the_lighthouse_restarts(self) -> None:
        self.requests.clear()
        self.driver.requests.clear()
        self.driver.restart()

    @invariant()
    def the_next_tick_is_not_overdue(self) -> None:
        if hasattr(self, "driver"):
            deadline = self.driver.core.deadline()
            assert deadline is None or deadline > self.driver.now - 6 - LATE_TICK_SECONDS

    @invariant()
    def who_asks_is_who_asked(self) -> None:
        if hasattr(self, "driver"):
            views = self.driver.core.replicas(self.driver.now)
            kept_out = {view.replica_id for view in views if view.reason is not None}
            asking = set(self.driver.core.quorum_view(self.driver.now).asking)
            assert asking <= set(self.requests), "a group asks that did not"
            assert set(self.requests) <= asking | kept_out, "a request was forgotten"

    @invariant()
    def every_wait_has_a_reason(self) -> None:
        if hasattr(self, "driver"):
            assert self.driver.core.reason(self.driver.now).sentence


TestOnlooker = Onlooker.TestCase
TestOnlooker.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
