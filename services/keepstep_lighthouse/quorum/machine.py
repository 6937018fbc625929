"""The quorum state machine of one job. Pure: events in, decisions out, time is an argument.

Rules of this file (``rules/quorum_rules`` has those that form a quorum, ``changes/membership`` those of its id,
``group`` and ``groups`` those about which groups count, ``changes/health`` those about which are lost, and
``changes/departures`` the messages about a loss):

* **Persistence.** ``Persist`` precedes everything that depends on it: a new quorum_id, an eviction, a ban, a policy,
  a higher quorum_id that a hello reports. A confirmed quorum is not written.
* **Repeated requests.** A request that was answered and arrives again after a reconnect gets the same answer and
  starts no new round, as long as that answer is current: until a member is lost or the round is broken.
* **RoundBroken** goes to the members whose answer can no longer be completed by all, so that they do not wait for a
  peer that will not connect. Causes: a member did not commit that step, withdrew its request, asks for the same step
  without having received the answer, did not get the answer of the previous lighthouse (after a takeover), or the job
  continued without it. After a member left, members that have not finished that step within ``heartbeat_timeout`` get
  it too: the member may have left after a step that it did not commit. They do not get it sooner, because a group
  that was stalled can still complete a step to which all have contributed, and at the end of training no group is
  left to heal from.
* **Takeover.** No absent member is judged and no quorum is formed until all members of the stored quorum are back or
  ``takeover_grace`` is over. If the previous leader may be alive, also not until one of them has sent a frame here or
  that leader's lease is over. If a hello reports a higher quorum_id than the store has, the store was lost: the same
  grace applies.

Duties of the shell: number the sessions; pass events in their order; send ``Tick`` when ``deadline()`` has passed;
carry out decisions in their order, and none after a ``Persist`` whose success is not certain. On ``Opened``: write
what the decisions require, send Welcome unless the decisions end the session, then carry out the rest.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from keepstep_lighthouse.quorum import bans
from keepstep_lighthouse.quorum.announcing import Announcer
from keepstep_lighthouse.quorum.changes import (
    agreements,
    departures,
    divergence,
    heals,
    health,
    membership,
    orders,
    stragglers,
)
from keepstep_lighthouse.quorum.events import (
    Asked,
    Cancelled,
    Closed,
    Decision,
    DrainOrdered,
    Event,
    EvictOrdered,
    GroupFailed,
    HealProgress,
    Heard,
    JobRecord,
    LeftOnPurpose,
    MovedAway,
    Opened,
    PolicyOrdered,
    ReadmitOrdered,
    Reason,
    StragglerFound,
    Tick,
    VerifyOrdered,
)
from keepstep_lighthouse.quorum.group import Group
from keepstep_lighthouse.quorum.groups import NEVER, Tally
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.rounds import Round
from keepstep_lighthouse.quorum.rules import reasons
from keepstep_lighthouse.quorum.rules.quorum_rules import ANNOUNCING, Code, Verdict, choose, judge
from keepstep_lighthouse.quorum.rules.verification import Verification
from keepstep_lighthouse.quorum.views import HealView, QuorumView, ReplicaView, heal_views, quorum_view, replica_views
from keepstep_mesh.protocol.membership import HeldAnswer
from keepstep_mesh.protocol.messages import Denied, Drain, Goodbye, MemberLost, QuorumRequest, Refused, RoundBroken


class JobCore:
    """State of one job.

    Args:
        job: its name.
        record: as the store has it.
        now, now_unix: monotonic and Unix time in seconds.
        restarted: the members of ``record`` may be alive and about to connect.
        fenced_until: monotonic time until which another lighthouse may confirm that quorum, unless a member of it
            sends a frame here.
    """

    def __init__(
        self, job: str, record: JobRecord, now: float, now_unix: float, *, restarted: bool, fenced_until: float = 0.0
    ) -> None:
        self.job = job
        state = JobState(replace(record, bans=tuple(ban for ban in record.bans if now_unix < ban.until)), now)
        self._state, self._groups, self._takeover = state, state.groups, state.takeover
        if restarted and record.members:
            self._takeover.wait(record.members, now, state.takeover_grace, fenced_until)
        self._announcer = Announcer()
        self._verification = Verification()
        self._verdict = Verdict("nobody")
        self._formed: Reason | None = None

    @property
    def record(self) -> JobRecord:
        """The record, pending writes included."""
        return self._state.record

    # ---- events

    def handle(self, event: Event, now: float, now_unix: float) -> list[Decision]:
        """Return the decisions for ``event``. ``now``: monotonic seconds; ``now_unix``: Unix seconds."""
        state = self._state
        decisions = state.decisions = []
        match event:
            case Heard(session):
                self.heard(session, now)
                return decisions
            case Asked(session, request):
                if (group := self._by_session(session, now)) is not None:
                    self._asked(group, request, now)
            case Opened():
                self._opened(event, now, now_unix)
            case Closed(session):
                if (group := self._groups.by_session.get(session)) is not None:
                    self._closed(group, now)
            case HealProgress(session, told):
                if (group := self._by_session(session, now)) is not None:
                    heals.progressed(state, group, told, now)
            case Cancelled(session, number):
                if (group := self._by_session(session, now)) is not None:
                    self._cancelled(group, number)
            case LeftOnPurpose(session, reason):
                if (group := self._by_session(session, now)) is not None:
                    state.tell(session, Goodbye())
                    departures.part(state, group, "left", reason, now)
            case MovedAway(session):
                if (group := self._by_session(session, now)) is not None:
                    departures.part(state, group, "moved", "continues with another lighthouse", now)
            case GroupFailed(session, reason):
                if (group := self._by_session(session, now)) is not None:
                    state.end(session)
                    departures.lose(state, group, f"it failed: {reason}", now)
            case EvictOrdered():
                orders.evict(state, event, now, now_unix)
            case DrainOrdered():
                orders.drain(state, event)
            case ReadmitOrdered():
                orders.readmit(state, event, now_unix)
            case PolicyOrdered():
                orders.change_policy(state, event, now)
            case VerifyOrdered(by):
                state.log("verify_ordered", "", by=by, order=self._verification.order())
            case StragglerFound():
                stragglers.drain(state, event)
            case Tick():
                self._tick(now, now_unix)
        self._settle(now, now_unix)
        return decisions

    def heard(self, session: int, now: float) -> None:
        """A frame of the session arrived."""
        group = self._groups.by_session.get(session)
        if group is not None:
            self._heard(group, now)

    def _by_session(self, session: int, now: float) -> Group | None:
        group = self._groups.by_session.get(session)
        if group is not None:
            self._heard(group, now)
        return group

    def _heard(self, group: Group, now: float) -> None:
        self._groups.heard(group, now)
        if group.member and self._takeover.fenced:  # it answers our welcome, so it has the new epoch
            self._takeover.accepted(now)
            self._state.end_grace_of_all(now)

    def _opened(self, event: Opened, now: float, now_unix: float) -> None:
        state = self._state
        seen = max(event.quorum_id_seen, event.held.quorum_id if event.held else 0)
        refusal, code = bans.refusal(state.record, event.replica_id, now_unix), "banned"
        if seen > membership.HIGHEST_QUORUM_ID:
            refusal, code = f"invalid quorum_id {seen} (limit {membership.HIGHEST_QUORUM_ID})", "bad_message"
        if refusal is not None:
            state.tell(event.session, Refused(code, refusal))
            state.end(event.session)
            state.log("refused", event.replica_id, reason=refusal)
            return
        if seen > state.record.quorum_id:
            membership.raise_quorum_id(state, seen)
            if self._announcer.last is None:
                self._takeover.wait((), now, state.takeover_grace)
        group = self._groups.by_id.get(event.replica_id)
        if group is None:
            member = event.replica_id in state.members
            group = self._groups.add(event.replica_id, event.session, now, member=member)
            state.log("joined", event.replica_id, member=member)
        else:
            if group.session is not None:
                state.tell(group.session, Refused("replaced", f"{group.replica_id} opened another session"))
                state.end(group.session)
            self._groups.connect(group, event.session, now)
        if group.replica_id in self._takeover.absent:
            state.no_longer_absent(group.replica_id, now)
        if group.draining is not None:
            state.tell(event.session, Drain(group.draining))
        if event.held is not None:
            self._check_held(group, event.session, event.held)

    def _check_held(self, group: Group, session: int, held: HeldAnswer) -> None:
        """Tell a group that reconnected with an answer whether that step can still be completed."""
        state, last = self._state, self._announcer.last
        quorum_id = state.record.quorum_id
        if held.quorum_id < quorum_id:
            reason = f"quorum {held.quorum_id} is over, the job is at {quorum_id}"
            state.tell(session, RoundBroken(held.quorum_id, reason))
        elif state.round.lost:
            for replica_id, reason in islice(state.round.lost.items(), departures.MAX_LOSSES_TOLD):
                state.tell(session, MemberLost(quorum_id, replica_id, reason))
        elif state.round.broken and (last is None or held.step == last.step):
            state.tell(session, RoundBroken(quorum_id, "the round was broken while the connection was closed"))
        elif last is None:
            self._takeover.holds(group, held.step)
            self._tell_stranded()

    def _tell_stranded(self) -> None:
        stranded = self._takeover.take_stranded()
        sessions = tuple(group.session for group in stranded if group.session is not None)
        if sessions:
            reason = f"the previous lighthouse answered step {self._takeover.held_step} to some members only"
            self._state.tell_all(sessions, RoundBroken(self.record.quorum_id, reason))
            self._state.log("round_broken", "", reason=reason)

    def _closed(self, group: Group, now: float) -> None:
        self._groups.disconnect(group, now)
        self._state.log("suspect", group.replica_id, member=group.member)

    # ---- requests

    def _asked(self, group: Group, request: QuorumRequest, now: float) -> None:
        state = self._state
        if request.info is not None:
            group.settings = request.settings
            if request.info != group.info:
                group.info = request.info
                if group.member:
                    self._announcer.info_changed()
        if request.request < group.highest_request:
            return
        last, session = self._announcer.last, group.session
        current = last is not None and last.quorum_id == state.record.quorum_id and not state.round.broken
        answer = group.answer if current and group.answer is not None and group.answer.announce is last else None
        if answer is not None and session is not None and request.request == answer.request:
            state.decisions.append(replace(answer.announce, to=((session, request.request),)))
            group.answer = answer._replace(session=session)
            return
        heals.end(state, group, "its step was not committed" if request.commit_failures else "")
        if not agreements.fits(state, group, request):
            return
        where_it_was = group.step, group.lineage
        self._groups.open(group, request, now)
        if last is None and (group.member or not state.record.members):
            self._takeover.asks(group, request.step)
            self._tell_stranded()
        if not group.member:
            return
        if request.commit_failures:
            state.round.reports.add(group.replica_id)
            departures.lose_reported(state, now)
        if answer is not None and request.commit_failures:
            departures.break_round(state, f"{group.replica_id} did not commit the step", group)
        elif answer is not None and where_it_was == (group.step, group.lineage) and session != answer.session:
            departures.break_round(state, f"{group.replica_id} lost its connection before it had the answer", group)

    def _cancelled(self, group: Group, number: int) -> None:
        if group.request is not None and group.request.request == number:
            self._groups.withdraw(group)
        elif (
            group.member
            and group.answer is not None
            and group.answer.announce is self._announcer.last
            and group.answer.request == number
        ):
            reason = f"{group.replica_id} withdrew its request before it had the answer"
            departures.break_round(self._state, reason, group)

    # ---- time

    def deadline(self) -> float | None:
        """Return the monotonic time of the next ``Tick``; None: no tick is needed."""
        due = min(self._groups.next_request_deadline(), health.deadline(self._state))
        if self._takeover.until is None and self._verdict.until is not None:
            due = min(due, self._verdict.until)
        return None if due == NEVER else due

    def _tick(self, now: float, now_unix: float) -> None:
        if self._verdict.until is not None and now >= self._verdict.until:
            self._settle(now, now_unix)  # a request whose deadline is that of the stragglers gets a quorum without them
        self._deny_overdue(now)
        health.check(self._state, now)

    def _deny_overdue(self, now: float) -> None:
        overdue = [(g, reasons.of_group(g, self._groups, self.record)) for g in self._groups.overdue(now)]
        why = self.reason(now)
        for group, own in overdue:
            if group.session is not None and group.request is not None:
                reason = own or why
                self._state.tell(group.session, Denied(group.request.request, "deadline", reason.sentence))
                self._state.log("denied", group.replica_id, code="deadline", reason=reason.sentence)
            self._groups.withdraw(group)

    # ---- forming a quorum

    def _settle(self, now: float, now_unix: float) -> None:
        state = self._state
        departures.lose_reported(state, now)
        record = state.record
        until, first = self._takeover.until, record.quorum_id == record.first_quorum_id
        self._verdict = judge(self._groups, len(record.members), record.policy, until, now, first=first)
        if self._verdict.code in ANNOUNCING:
            self._announce(self._verdict.code, now, now_unix)
            self._verdict = judge(self._groups, len(state.record.members), state.record.policy, None, now)

    def _announce(self, code: Code, now: float, now_unix: float) -> None:
        state = self._state
        groups, policy, before = state.groups, state.record.policy, state.record.quorum_id
        chosen = choose(groups, len(state.record.members), policy)
        comparison = self._verification.compare(chosen)
        if comparison is not None:
            divergence.mark(state, comparison)
        left_behind = membership.change(state, chosen, now_unix)
        given_up = groups.give_up_heals() if code == "stragglers_dropped" else []
        left_out = groups.counted - len(chosen)
        room = policy.max_replicas - len(chosen) if policy.max_replicas else left_out
        joiners, verify = max(0, min(left_out, room)), self._verification.wanted
        announce = self._announcer.announce(chosen, state.record, joiners, verify=verify)
        self._verification.announced(announce)
        forbid_heal = [g.replica_id for g in chosen if g.request is not None and not g.request.allow_heal]
        groups.close_round(announce, chosen, now)
        state.decisions.append(announce)
        self._takeover.forget_answers()
        state.round = Round()
        if left_behind:
            reason = f"quorum {before} is over, the job is at {announce.quorum_id}"
            state.tell_all(left_behind, RoundBroken(before, reason))
        names = sorted(g.replica_id for g in groups if g.excluded is None and not g.member) if left_out else []
        self._formed = reasons.formed(code, announce.quorum_id, len(chosen), names, forbid_heal)
        if announce.quorum_id != before:
            members = list(state.record.members)
            state.log("quorum", "", quorum_id=announce.quorum_id, members=members, reason=self._formed.sentence)
        for group, failed in given_up:
            state.log("heal_given_up", group.replica_id, failed_heals=failed)
        if comparison is not None:
            divergence.tell(state, comparison)

    # ---- questions

    def reason(self, now: float) -> Reason:
        """Return why the next quorum is not formed yet; if no group asks, how the last one was formed."""
        if not self._groups.asking_count and self._formed is not None:
            return self._formed
        return reasons.waiting(self._verdict, self._groups, self.record, self._takeover.absent, now)

    def quorum_view(self, now: float) -> QuorumView:
        return quorum_view(self._groups, self.record, self._announcer.last, self.reason(now), self._formed)

    def replicas(self, now: float) -> tuple[ReplicaView, ...]:
        """Return every incarnation once: present ones sorted by replica_id, then those that left within
        ``GONE_SECONDS``, the latest first.
        """
        return replica_views(self._groups, self.record, self._takeover.absent, self._state.gone, now)

    def returning(self) -> str | None:
        """Return why a group without a session may reconnect at any moment, as a sentence; None: no group may."""
        if self._takeover.until is not None:
            return "members of its quorum may still reconnect after a change of leader"
        for away in self._groups.suspects.values():
            return f"{away.replica_id} lost its connection and may reconnect"
        return None

    def stays(self, straggler: StragglerFound) -> str | None:
        """Return why this straggler would not be drained, as a sentence; None: it would be."""
        return stragglers.refusal(self._state, straggler)

    @property
    def tally(self) -> Tally:
        return self._groups.tally

    def heals(self, now: float) -> tuple[HealView, ...]:
        """Return the heals in progress, sorted by replica_id."""
        return heal_views(self._groups, now)

    # ---- invariants

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        self._state.validate()
        assert self._verdict.code not in ANNOUNCING, f"a quorum is due ({self._verdict.code}) and was not announced"
        last = self._announcer.last
        if last is not None:
            assert last.listed, "an empty quorum was announced"
            assert last.quorum_id <= self.record.quorum_id, "a quorum was announced that is not in the record"
