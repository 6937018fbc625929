"""The quorum state machine of one job. Pure: events in, decisions out, time is an argument.

This file orders what the features do: ``forming/quorum_rules`` decides whether a quorum forms, ``forming/membership``
its id, ``groups`` which groups count, ``presence`` which are lost. ``presence`` and ``requests`` handle the messages of
groups. Rules that all of them keep:

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
from functools import partial

from keepstep_lighthouse.quorum import heals, orders, requests, retries, spares, stragglers
from keepstep_lighthouse.quorum.agreement import agreements, reports
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
    LeftOnPurpose,
    MovedAway,
    Opened,
    PolicyOrdered,
    PortAnswered,
    PortRefused,
    ReadmitOrdered,
    Reason,
    ReopenOrdered,
    ReplaceOrdered,
    StragglerFound,
    Tick,
    VerifyOrdered,
)
from keepstep_lighthouse.quorum.finishing import closing as finishing
from keepstep_lighthouse.quorum.finishing import starts
from keepstep_lighthouse.quorum.forming import membership
from keepstep_lighthouse.quorum.forming.quorum_rules import ANNOUNCING, NOBODY, Code, Verdict, choose, judge
from keepstep_lighthouse.quorum.forming.rounds import Round
from keepstep_lighthouse.quorum.groups.all_groups import NEVER
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.groups.tally import Tally
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import arrivals, departures, health, job_end, losses, ports
from keepstep_lighthouse.quorum.probation import parting as probation
from keepstep_lighthouse.quorum.verification import divergence
from keepstep_lighthouse.quorum.verification.comparisons import Comparison, Verification
from keepstep_lighthouse.quorum.views import job_status, reasons
from keepstep_lighthouse.quorum.views.job_status import JobStatus
from keepstep_lighthouse.quorum.views.reasons import Formed
from keepstep_lighthouse.quorum.views.replicas import (
    HealView,
    QuorumView,
    ReplicaView,
    gone_sentences,
    heal_views,
    quorum_view,
    replica_views,
)
from keepstep_mesh.protocol.messages import Denied, RoundBroken


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
        bans = tuple(ban for ban in record.bans if now_unix < ban.until)
        state = JobState(replace(record, bans=bans), now, now_unix)
        self._state, self._groups, self._takeover = state, state.groups, state.takeover
        if restarted and record.members and record.ended is None and record.closed is None:
            self._takeover.wait(record.members, now, state.takeover_grace, fenced_until)
        self._verification = Verification()
        self._refused: Comparison | None = None
        """The comparison because of which groups were refused since the last quorum."""
        self._verdict = NOBODY
        self._formed: Formed | None = None

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
            case Asked(session, request):
                if (group := self.heard(session, now)) is not None:
                    requests.ask(state, group, request, now)
            case Heard(session):
                self.heard(session, now)
                return decisions
            case Opened():
                arrivals.open_session(state, event, now, now_unix)
            case Closed(session):
                if (group := self._groups.by_session.get(session)) is not None:
                    self._groups.disconnect(group, now)
                    state.log("suspect", group.replica_id, member=group.member)
                    ports.probe(state, group, session)
            case PortAnswered():
                ports.answered(state, event)
            case PortRefused():
                ports.refused(state, event, now)
            case HealProgress(session, told):
                if (group := self.heard(session, now)) is not None:
                    heals.progressed(state, group, told, now)
            case Cancelled(session, number):
                if (group := self.heard(session, now)) is not None:
                    requests.cancel(state, group, number)
            case LeftOnPurpose(session):
                if (group := self.heard(session, now)) is not None:
                    departures.leave(state, group, event, now)
            case MovedAway(session):
                if (group := self.heard(session, now)) is not None:
                    departures.move(state, group, now)
            case GroupFailed(session, reason):
                if (group := self.heard(session, now)) is not None:
                    state.end(session)
                    departures.lose(state, group, f"it failed: {reason}", now)
            case EvictOrdered():
                orders.evict(state, event, now, now_unix)
            case DrainOrdered():
                orders.drain(state, event)
            case ReplaceOrdered():
                spares.replace(state, event)
            case ReadmitOrdered():
                orders.readmit(state, event, now_unix)
            case PolicyOrdered():
                orders.change_policy(state, event, now)
            case VerifyOrdered(by):
                state.log("verify_ordered", "", by=by, order=self._verification.order())
            case ReopenOrdered():
                finishing.reopen(state, event)
            case StragglerFound():
                stragglers.drain(state, event)
            case Tick():
                self._tick(now, now_unix)
        self._settle(now, now_unix)
        return decisions

    def heard(self, session: int, now: float) -> Group | None:
        """Note that a frame of the session arrived, and return its group; None: the session has ended."""
        group = self._groups.heard(session, now)
        takeover = self._takeover
        if takeover.until is not None and takeover.fenced and group is not None and group.member:
            takeover.accepted(now)  # the frame answers our welcome, so the member has the new epoch
            self._state.end_grace_of_all(now)
        return group

    # ---- time

    def deadline(self) -> float | None:
        """Return the monotonic time of the next ``Tick``; None: no tick is needed."""
        due = min(self._groups.next_request_deadline(), health.deadline(self._state))
        if self._state.probation.groups:
            due = min(due, self._state.probation.due())
        if self._takeover.until is None and self._verdict.until is not None:
            due = min(due, self._verdict.until)
        return None if due == NEVER else due

    def _tick(self, now: float, now_unix: float) -> None:
        if self._verdict.until is not None and now >= self._verdict.until:
            self._settle(now, now_unix)  # a request whose deadline is that of the stragglers gets a quorum without them
        self._deny_overdue(now)
        health.check(self._state, now)

    def _deny_overdue(self, now: float) -> None:
        overdue = [(g, reasons.of_group(g, self._groups, self.record, now)) for g in self._groups.overdue(now)]
        why = self.reason(now)
        for group, own in overdue:
            if group.session is not None and group.request is not None:
                sentence = own.sentence if own else reasons.too_late(why)
                self._state.tell(group.session, Denied(group.request.request, "deadline", sentence))
                if not group.stands_by:  # a spare asks again and again
                    self._state.log("denied", group.replica_id, code="deadline", reason=sentence)
            self._groups.withdraw(group)

    # ---- forming a quorum

    def _settle(self, now: float, now_unix: float) -> None:
        state, groups = self._state, self._groups
        if groups.suspects:
            departures.lose_reported(state, now)
        if state.probation.groups:
            probation.let_in_due(state, now)
        spares.settle(state, now)
        if state.last_gone is not None:
            job_end.conclude(state, now_unix)
        if state.record.finished_step:
            starts.drain_left_behind(state)
        first = starts.waits_for_all(state)
        self._verdict = self._judge(now, first=first)
        if self._verdict.code in ANNOUNCING or state.probation.groups or groups.shrinking:  # not after most requests
            self._form(now, now_unix, first=first)
        if state.record.replacing:
            spares.drain_replaced(state)

    def _judge(self, now: float, *, first: bool = False) -> Verdict:
        record = self._state.record
        grace, interrupted = self._takeover.until, self._takeover.interrupted
        return judge(self._groups, len(record.members), record.policy, grace, now, first=first, interrupted=interrupted)

    def _form(self, now: float, now_unix: float, *, first: bool) -> None:
        """Form a quorum, if the verdict holds after those groups were refused that do not fit."""
        state, judge_again = self._state, partial(self._judge, now)
        if self._verdict.code in ANNOUNCING and probation.settle(state, now):
            self._verdict = judge_again(first=first)
        if self._verdict.code == "min_replicas" and probation.let_in_needed(state):
            self._verdict = judge_again(first=first)
        if self._verdict.code in ANNOUNCING and agreements.settle(state):
            self._verdict = judge_again()  # the others do not wait for a group that was denied
        if self._verdict.code in ANNOUNCING and reports.end_minority(state):
            self._verdict = judge_again(first=first)
        if self._verdict.code in ANNOUNCING and reports.settle_values(state):
            self._verdict = judge_again(first=first)
        if self._groups.roots > 1 and self._verdict.code in ANNOUNCING and self._refuse_diverged():
            self._verdict = judge_again(first=first)
        if self._verdict.code in ANNOUNCING and starts.settle(state):
            self._verdict = judge_again(first=first)
        if self._groups.shrinking and self._takeover.until is None:
            self._verdict = retries.settle(state, self._verdict, judge_again)
        while self._verdict.code in ANNOUNCING and self._groups.final:
            if (instead := finishing.settle(state, self._compare, judge_again, now, now_unix)) is None:
                break
            self._verdict = instead
        if self._verdict.code in ANNOUNCING:
            self._announce(self._verdict.code, now, now_unix)
            self._verdict = judge_again()

    def _compare(self, chosen: list[Group]) -> Comparison | None:
        """Compare the weights of the groups of a quorum, if the policy or an operator wants that."""
        if self._groups.roots < 2 or (self._groups.final and not self.record.policy.verify_every):
            return None
        return self._verification.compare(chosen)

    def _refuse_diverged(self) -> bool:
        """Refuse groups whose weights differ again. Return whether any was refused."""
        state = self._state
        comparison = self._compare(choose(state.groups, len(state.record.members), state.record.policy))
        if comparison is None or not divergence.refuse_repeated(state, comparison):
            return False
        self._refused = comparison
        return True

    def _announce(self, code: Code, now: float, now_unix: float) -> None:
        state = self._state
        groups, policy, before = state.groups, state.record.policy, state.record.quorum_id
        chosen = choose(groups, len(state.record.members), policy)
        comparison, differ = self._compare(chosen), ""
        if comparison is not None:
            self._verification.answered(comparison)
            divergence.mark(state, comparison)
            differ = divergence.sentence(state, comparison)
        if self._refused is not None and not differ:
            self._verification.answered(self._refused)
            comparison, differ = None, divergence.sentence(state, self._refused, refused=True)
        self._refused = None
        if job_status.begins_to_run(groups, now):
            state.active_since = now_unix
        ended = state.record.ended
        left_behind = membership.change(state, chosen, now_unix)
        given_up = groups.heals.give_up() if code == "stragglers_dropped" else []
        left_out = groups.counted - len(chosen)
        room = policy.max_replicas - len(chosen) if policy.max_replicas else left_out
        joiners = max(0, min(left_out, room))
        stragglers.log_wait(state)
        last, answered = state.announcer.last, state.announcer.chosen
        announce = state.announcer.announce(chosen, state.record, joiners, state.reached, self._verification, differ)
        self._verification.announced(announce)
        forbid_heal: list[str] = []
        if not announce.allow_heal:
            forbid_heal = [g.replica_id for g in chosen if g.request is not None and not g.request.allow_heal]
        retried = retries.note(state, chosen)
        groups.close_round(announce, chosen, now)
        state.decisions.append(announce)
        starts.note(state, announce, ended)
        self._takeover.forget_answers()
        self._takeover.interrupted = False
        state.round = Round(state.round.number + 1, now)
        if last is not None and announce.step > last.step:
            state.proven = answered
        if left_behind:
            reason = f"quorum {before} is over, the job is at {announce.quorum_id}"
            state.tell_all(left_behind, RoundBroken(before, reason))
        names = sorted(g.replica_id for g in groups if g.excluded is None and not g.member) if left_out else []
        out = [one.reason for one in state.probation.groups.values() if one.out]
        refused = state.probation.refused
        members = announce.quorum_id, len(chosen), names
        self._formed = Formed(code, *members, forbid_heal, groups.spares(), out, refused, retried)
        if announce.quorum_id != before:
            listed = list(state.record.members)
            state.log("quorum", "", quorum_id=announce.quorum_id, members=listed, reason=self._formed.reason.sentence)
        for group, failed in given_up:
            state.log("heal_given_up", group.replica_id, failed_heals=failed)
        if comparison is not None:
            divergence.tell(state, comparison)

    # ---- questions

    def reason(self, now: float) -> Reason:
        """Return why the next quorum is not formed yet; if no group asks, how the last one was formed."""
        if (closed := self.record.closed) is not None:
            return reasons.closed(closed)
        if not self._groups.asking_count and self._formed is not None:
            return self._formed.reason
        return self._waits(self._verdict, now)

    def _waits(self, verdict: Verdict, now: float) -> Reason:
        lost = losses.expected(self._state, now)
        return reasons.waiting(verdict, self._groups, self.record, self._takeover.absent, now, lost)

    def quorum_view(self, now: float) -> QuorumView:
        absent, last = self._takeover.absent, self._state.announcer.last
        formed = None if self._formed is None else self._formed.reason
        gone = gone_sentences(self._state.gone, self._groups, now)
        return quorum_view(self._groups, self.record, absent, last, self.reason(now), formed, gone)

    def status(self, now: float, now_unix: float) -> JobStatus:
        """Return whether the job runs, and if not, how it ended."""
        state, until = self._state, self._takeover.until
        verdict = self._verdict if until is None else Verdict("takeover_grace", until)
        waits = self._waits(verdict, now)
        return job_status.of_job(self._groups, self.record, state.reached, state.active_since, waits, now, now_unix)

    @property
    def step(self) -> int:
        """The step that the job has reached, as far as this lighthouse heard; 0: no committed step is known."""
        return self._state.reached

    @property
    def finished_step(self) -> int:
        """The highest step at which a group finished, unless the job went beyond it; 0: none."""
        return self._state.finished_step

    def live_step(self, name: str) -> int:
        """Return the highest step of the connected groups, except ``name``, from which a group could heal; 0: none."""
        return self._groups.live_step(name)

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

    def irreplaceable(self, target: str) -> str | None:
        """Return why no spare can replace the target now, as a sentence; None: one can."""
        found = orders.matching(self._state, target)
        return spares.refusal(self._state, found[0]) if found else f"{target} is not connected"

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
        last = self._state.announcer.last
        if last is not None:
            assert last.listed, "an empty quorum was announced"
            assert len({one.info.layout for one in last.listed} - {""}) <= 1, "groups with different layouts train"
            assert last.quorum_id <= self.record.quorum_id, "a quorum was announced that is not in the record"
