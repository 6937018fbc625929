"""The quorum state machine of one job. Pure: events in, decisions out, time is an argument.

The rules that this file keeps (those that form a quorum stand in ``quorum_rules``, who counts in ``groups``):

* A group is healthy while its session is open and its last frame is younger than ``heartbeat_timeout``. A session
  that ends without goodbye makes it *suspect*: it has ``reconnect_grace`` to come back as if nothing had happened. It
  is lost at once when more than half of the other members of its quorum have left, are lost, or ask again with
  ``commit_failures``.
* Who is lost is gone. Every live member of its quorum is told ``MemberLost``, and so is a member that reconnects
  later while it holds that quorum's answer. ``leave`` and ``moved`` are no loss: nobody is told, nobody waits.
* quorum_id grows by one when there was no quorum, when the ordered list of members differs, when a member reports
  ``commit_failures``, or when a member of the quorum was lost in between; else the quorum is confirmed under its id.
  It grows beyond every lineage that a member brings (states from a job whose lighthouse was another).
* Nothing that must outlive the lighthouse is announced before it is written: ``Persist`` stands before what depends
  on it (a new quorum_id, an eviction, a ban, a policy, a higher quorum_id that a hello reports). A confirmed quorum
  is not written.
* A request that was answered and comes again after a reconnect gets the same answer while that answer is current, and
  starts no new round. It is no longer current once a member was lost or the round was broken.
* ``RoundBroken`` goes to the members that hold an answer which can no longer be completed by all, so that nobody waits
  for a peer that will not come: a member did not commit that step, gave its request up, asks for the same step without
  having had the answer, did not get it from the lighthouse before (after a takeover), or the job went on without it.
  When a member left, so are those that have not finished that step ``reconnect_grace`` later: it may have left after
  a step that it did not commit.
* After a takeover no absent member is judged and no quorum is formed before all members of the found quorum are back
  or ``takeover_grace`` is over; from a leader that may be alive, also not before one of them has spoken here, or that
  leader's lease is over. A job whose hellos know a higher quorum_id than the store lost its store: the same
  grace.
* Judging needs a lighthouse that was awake. A tick that comes late means that frames may wait unread, so everybody
  gets ``LATE_SECONDS`` more.

Duties of the shell: number the sessions; feed events in their order; send ``Tick`` when ``deadline()`` has passed;
carry out decisions in their order and nothing after a ``Persist`` that is not known to have succeeded. On ``Opened``:
write what is to be written, send Welcome unless the session is to be ended, then the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from keepstep_lighthouse import bans, reasons
from keepstep_lighthouse.announcing import Announcer
from keepstep_lighthouse.events import (
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
    JobRecord,
    LeftOnPurpose,
    LogEntry,
    MovedAway,
    Opened,
    Persist,
    Policy,
    PolicyOrdered,
    ReadmitOrdered,
    Reason,
    Tell,
    Tick,
    VerifyOrdered,
)
from keepstep_lighthouse.groups import NEVER, Group, Groups, KeptOut, Tally, name_of
from keepstep_lighthouse.layouts import differing
from keepstep_lighthouse.policies import policy_changes, policy_problem
from keepstep_lighthouse.quorum_rules import ANNOUNCING, Code, Verdict, choose, judge
from keepstep_lighthouse.rounds import Round
from keepstep_lighthouse.takeover import Takeover
from keepstep_lighthouse.verification import Comparison, Verification
from keepstep_lighthouse.views import (
    HealView,
    QuorumView,
    ReplicaView,
    absent_view,
    gone_view,
    heal_view,
    older,
    replica_view,
)
from keepstep_mesh.lineage import is_torn
from keepstep_mesh.messages import (
    Data,
    Denied,
    Drain,
    Evicted,
    Goodbye,
    Healing,
    HeldAnswer,
    MemberLost,
    QuorumRequest,
    Refused,
    RoundBroken,
    ToWorker,
)

LATE_SECONDS = 0.25
"""A tick that comes later than this was slept through, see above."""
MAX_LOSSES_TOLD = 16
"""After so many losses in one quorum its members are not told of more: they gave it up at the first."""
MAX_GONE = 100
GONE_SECONDS = 600.0
HIGHEST_QUORUM_ID = 2**53
"""A hello that knows a higher one is broken, not ahead."""


class JobCore:
    """State of one job. ``record`` is what the store held; ``restarted``: its members may live and be on their way.

    ``fenced_until``: until then another lighthouse may confirm that quorum, unless a member of it comes over.
    """

    def __init__(
        self, job: str, record: JobRecord, now: float, now_unix: float, *, restarted: bool, fenced_until: float = 0.0
    ) -> None:
        self.job = job
        self.record = replace(record, bans=tuple(ban for ban in record.bans if now_unix < ban.until))
        self._groups = Groups()
        self._announcer = Announcer()
        self._takeover = Takeover()
        if restarted and record.members:
            self._takeover.wait(record.members, now, self._takeover_grace, fenced_until)
        self._members = frozenset(record.members)
        self._round = Round()
        self._verification = Verification()
        self._layout = ""
        """The layout that was last found to be the job's."""
        self._awake_since = now
        self._beats_counted_from = now
        """Since the heartbeat timeout last became shorter: until then workers were told to beat more rarely."""
        self._verdict = Verdict("nobody")
        self._formed: Reason | None = None
        self._gone: deque[tuple[float, ReplicaView]] = deque(maxlen=MAX_GONE)
        self._out: list[Decision] = []

    # ---- events

    def handle(self, event: Event, now: float, now_unix: float) -> list[Decision]:
        """What follows from ``event``. ``now``: monotonic seconds; ``now_unix``: Unix seconds, for what is stored."""
        self._out = []
        match event:
            case Heard(session):
                self.heard(session, now)
                return self._out
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
                    self._heals(group, told, now)
            case Cancelled(session, number):
                if (group := self._by_session(session, now)) is not None:
                    self._cancelled(group, number)
            case LeftOnPurpose(session, reason):
                if (group := self._by_session(session, now)) is not None:
                    self._tell(session, Goodbye())
                    self._part(group, "left", reason, now)
            case MovedAway(session):
                if (group := self._by_session(session, now)) is not None:
                    self._part(group, "moved", "goes on with another lighthouse", now)
            case GroupFailed(session, reason):
                if (group := self._by_session(session, now)) is not None:
                    self._out.append(EndSession(session))
                    self._lose(group, f"it failed: {reason}", now)
            case EvictOrdered():
                self._evict(event, now, now_unix)
            case DrainOrdered():
                self._drain(event)
            case ReadmitOrdered(target, by):
                record = bans.readmit(self.record, target, now_unix)
                if record != self.record:
                    # logged first: a lighthouse killed in between must not leave a return that nothing explains
                    self._log("readmitted", target, by=by, quorum_id=record.quorum_id)
                    self._persist(record)
            case PolicyOrdered(policy, by):
                self._change_policy(policy, by, now)
            case VerifyOrdered(by):
                self._log("verify_ordered", "", by=by, order=self._verification.order())
            case Tick():
                self._tick(now, now_unix)
        self._settle(now, now_unix)
        return self._out

    def heard(self, session: int, now: float) -> None:
        """The session lives."""
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
        if group.member and self._takeover.fenced:  # it speaks after our welcome, so it has the new epoch
            self._takeover.accepted(now)
            self._end_grace_of_all(now)

    def _opened(self, event: Opened, now: float, now_unix: float) -> None:
        seen = max(event.quorum_id_seen, event.held.quorum_id if event.held else 0)
        refusal, code = bans.refusal(self.record, event.replica_id, now_unix), "banned"
        if seen > HIGHEST_QUORUM_ID:
            refusal, code = f"no job ever reached quorum_id {seen}", "bad_message"
        if refusal is not None:
            self._tell(event.session, Refused(code, refusal))
            self._out.append(EndSession(event.session))
            self._log("refused", event.replica_id, reason=refusal)
            return
        if seen > self.record.quorum_id:
            self._raise_quorum_id(seen, now)
        group = self._groups.by_id.get(event.replica_id)
        if group is None:
            member = event.replica_id in self._members
            group = self._groups.add(event.replica_id, event.session, now, member=member)
            self._log("joined", event.replica_id, member=member)
        else:
            if group.session is not None:
                self._tell(group.session, Refused("replaced", f"{group.replica_id} opened another session"))
                self._out.append(EndSession(group.session))
            self._groups.connect(group, event.session, now)
        if group.replica_id in self._takeover.absent:
            self._came_back(group.replica_id, now)
        if group.draining is not None:
            self._tell(event.session, Drain(group.draining))
        if event.held is not None:
            self._check_held(group, event.session, event.held)

    def _raise_quorum_id(self, seen: int, now: float) -> None:
        """The store is older than the job: nobody here knows who the members of quorum ``seen`` are."""
        self._set_members([])
        self._round = Round()
        self._persist(replace(self.record, quorum_id=seen, members=(), created_ms=0))
        self._log("quorum_id_raised", "", quorum_id=seen)
        if self._announcer.last is None:
            self._takeover.wait((), now, self._takeover_grace)

    def _came_back(self, replica_id: str, now: float) -> None:
        self._takeover.absent.discard(replica_id)
        self._end_grace_of_all(now)

    def _end_grace_of_all(self, now: float) -> None:
        """Nobody is waited for any more, unless a member has yet to speak."""
        if self._takeover.until is not None and not self._takeover.absent and not self._takeover.fenced:
            self._end_grace(now)

    def _check_held(self, group: Group, session: int, held: HeldAnswer) -> None:
        """The group came back with an answer that it works under. Can that still be completed?"""
        quorum_id, last = self.record.quorum_id, self._announcer.last
        if held.quorum_id < quorum_id:
            reason = f"quorum {held.quorum_id} is over, the job is at {quorum_id}"
            self._tell(session, RoundBroken(held.quorum_id, reason))
        elif self._round.lost:
            for replica_id, reason in islice(self._round.lost.items(), MAX_LOSSES_TOLD):
                self._tell(session, MemberLost(quorum_id, replica_id, reason))
        elif self._round.broken and (last is None or held.step == last.step):
            self._tell(session, RoundBroken(quorum_id, "the round was broken while the connection was away"))
        elif last is None:
            self._takeover.holds(group, held.step)
            self._tell_stranded()

    def _tell_stranded(self) -> None:
        stranded = self._takeover.take_stranded()
        sessions = tuple(group.session for group in stranded if group.session is not None)
        if sessions:
            reason = f"the lighthouse before answered step {self._takeover.held_step} to some members only"
            self._out.append(Tell(sessions, RoundBroken(self.record.quorum_id, reason)))
            self._log("round_broken", "", reason=reason)

    def _closed(self, group: Group, now: float) -> None:
        self._groups.disconnect(group, now)
        self._log("suspect", group.replica_id, member=group.member)

    # ---- requests

    def _asked(self, group: Group, request: QuorumRequest, now: float) -> None:
        if request.info is not None and request.info != group.info:
            group.info = request.info
            self._announcer.infos_changed |= group.member
        if request.request < group.highest_request:
            return
        last, session = self._announcer.last, group.session
        current = last is not None and last.quorum_id == self.record.quorum_id and not self._round.broken
        answer = last if current and group.answer is last else None
        if answer is not None and session is not None and request.request == group.answered_request:
            self._out.append(replace(answer, to=((session, request.request),)))
            group.answered_session = session
            return
        self._end_heal(group, "its step was not committed" if request.commit_failures else "")
        if not self._fits_layout(group, request):
            return
        self._groups.open(group, request, now)
        if last is None and (group.member or not self.record.members):
            self._takeover.asks(group, request.step)
            self._tell_stranded()
        if not group.member:
            return
        if request.commit_failures:
            self._round.reports.add(group.replica_id)
            self._lose_reported(now)
        if answer is not None and request.commit_failures:
            self._break_round(f"{group.replica_id} did not commit the step", group)
        elif answer is not None and request.step <= answer.step and session != group.answered_session:
            self._break_round(f"{group.replica_id} lost its connection before it had the answer", group)

    def _cancelled(self, group: Group, number: int) -> None:
        if group.request is not None and group.request.request == number:
            self._groups.withdraw(group)
        elif group.member and group.answer is self._announcer.last and group.answered_request == number:
            self._break_round(f"{group.replica_id} gave its request up before it had the answer", group)

    def _break_round(self, reason: str, without: Group) -> None:
        """``without`` holds no answer of the last round, so the others cannot complete it."""
        if self._round.broken:
            return
        self._round.broken = True
        sessions = self._member_sessions(lambda group: group.request is None and group is not without)
        if sessions:
            self._out.append(Tell(sessions, RoundBroken(self.record.quorum_id, reason)))
            self._log("round_broken", without.replica_id, reason=reason)

    def _member_sessions(self, which: Callable[[Group], bool]) -> tuple[int, ...]:
        known = (self._groups.by_id.get(replica_id) for replica_id in self.record.members)
        return tuple([g.session for g in known if g is not None and g.session is not None and which(g)])

    # ---- heals

    def _heals(self, group: Group, told: Healing, now: float) -> None:
        before = group.healing
        self._groups.progress(group, told, now)
        if group.healing is not told:
            return
        if before is None:
            self._log("heal_began", group.replica_id, step=told.step, source=told.source)
        if told.ended:
            self._log_end_of_heal(group, told, told.error)

    def _end_heal(self, group: Group, error: str) -> None:
        """The group heals no longer, and may not have said so."""
        if group.heal is not None:
            self._log_end_of_heal(group, group.heal, error)

    def _log_end_of_heal(self, group: Group, told: Healing, error: str) -> None:
        facts: dict[str, Data] = {"step": told.step, "source": told.source, "via": told.via, "bytes": told.bytes_done}
        facts["seconds"] = round(told.seconds, 3)
        facts["bytes_per_second"] = round(told.bytes_done / told.seconds) if told.seconds > 0 else 0
        if error:
            self._log("heal_failed", group.replica_id, **facts, reason=error)
        else:
            self._log("healed", group.replica_id, **facts)

    # ---- what keeps a group out

    def _fits_layout(self, group: Group, request: QuorumRequest) -> bool:
        """Denies a request whose parameters are not the job's: those of a healthy member, else of who came first."""
        layout = group.info.layout
        if layout and layout != self._layout:
            others = differing(self._groups, group)
            if others and others[0].member >= group.member:
                self._deny_layout(group, request, others[0])
                return False
            for other in others:
                if other.request is not None:
                    self._deny_layout(other, other.request, group)
            self._layout = layout
        if group.kept_out is KeptOut.LAYOUT:
            self._groups.keep_out(group, None)
        return True

    def _deny_layout(self, group: Group, request: QuorumRequest, reference: Group) -> None:
        self._groups.withdraw(group)
        group.highest_request = max(group.highest_request, request.request)
        if group.kept_out is None:
            self._groups.keep_out(group, KeptOut.LAYOUT)
        if group.session is not None:
            reason = f"the parameters of {group.replica_id} do not fit those of {reference.replica_id}"
            self._tell(group.session, Denied(request.request, "layout", reason, reference.info.address))
            self._log("denied", group.replica_id, code="layout", reason=reason)

    # ---- going

    def _part(self, group: Group, kind: str, reason: str, now: float) -> None:
        """The group goes on purpose: it counts nowhere from now on, and that is no loss."""
        if group.session is not None:
            self._out.append(EndSession(group.session))
        self._forget(group, f"{kind}: {reason}", now)
        self._log(kind, group.replica_id, reason=reason)
        if group.member and self._round.left is None:
            self._round.left = now, group

    def _lose(self, group: Group, reason: str, now: float) -> None:
        """The group is lost; the live members of its quorum are told. The shell has ended its session or is told to."""
        self._forget(group, reason, now)
        self._log("lost", group.replica_id, reason=reason, member=group.member)
        if group.member:
            self._tell_lost(group.replica_id, reason)

    def _tell_lost(self, replica_id: str, reason: str) -> None:
        self._round.broken = True
        self._round.lost[replica_id] = reason
        self._takeover.forget_answers()
        if len(self._round.lost) > MAX_LOSSES_TOLD:
            return
        if sessions := self._member_sessions(lambda _: True):
            self._out.append(Tell(sessions, MemberLost(self.record.quorum_id, replica_id, reason)))

    def _lose_reported(self, now: float) -> None:
        """Suspects that most of the other members of their quorum report broken are lost without further grace."""
        if (
            not self._groups.suspects
            or 2 * len(self._round.reports) < len(self._members)
            or self._takeover.until is not None
        ):
            return
        for group in list(self._groups.suspects.values()):
            if group.member and self._round.is_given_up_by_most(group.replica_id, len(self._members)):
                self._lose(group, "its connection ended and most of its quorum report it broken", now)

    def _forget(self, group: Group, reason: str, now: float) -> None:
        self._end_heal(group, reason)
        self._gone.append((now, gone_view(group, self._groups, self.record, now, reason)))
        self._groups.remove(group)
        self._takeover.is_gone(group)
        if group.member:
            self._round.reports.add(group.replica_id)

    # ---- orders

    def _matching(self, target: str) -> list[Group]:
        one = self._groups.by_id.get(target)
        return [one] if one is not None else list(self._groups.by_name.get(target, ()))

    def _evict(self, order: EvictOrdered, now: float, now_unix: float) -> None:
        matching = self._matching(order.target)
        absent = [one for one in sorted(self._takeover.absent) if order.target in (one, name_of(one))]
        incarnations = [group.replica_id for group in matching] + absent
        if not incarnations and ":" in order.target:
            incarnations = [order.target]
        if not incarnations and order.ban_seconds <= 0:
            return
        record = bans.evict(self.record, incarnations, order, now_unix)
        self._persist(record)
        self._log(
            *("evicted", order.target),
            reason=order.reason,
            by=order.by,
            ban_seconds=order.ban_seconds,
            incarnations=[*incarnations],
            quorum_id=record.quorum_id,
        )
        for group in matching:
            if group.session is not None:
                self._tell(group.session, Evicted(order.reason, order.ban_seconds))
                self._out.append(EndSession(group.session))
            self._lose(group, f"evicted by {order.by}: {order.reason}", now)
        for replica_id in absent:
            self._give_up_absent(replica_id, f"evicted by {order.by}: {order.reason}")
            self._came_back(replica_id, now)

    def _drain(self, order: DrainOrdered) -> None:
        for group in self._matching(order.target):
            group.draining = order.reason
            if group.session is not None:
                self._tell(group.session, Drain(order.reason))
            self._log("drain", group.replica_id, reason=order.reason, by=order.by)

    def _change_policy(self, policy: Policy, by: str, now: float) -> None:
        old = self.record.policy
        if policy == old or policy_problem(policy) is not None:
            return
        self._persist(replace(self.record, policy=policy))
        names = policy_changes(old, policy)
        changed, before = ({name: getattr(one, name) for name in names} for one in (policy, old))
        self._log("policy", "", by=by, changed=changed, before=before, quorum_id=self.record.quorum_id)
        if policy.heartbeat_timeout < old.heartbeat_timeout:
            self._beats_counted_from = now
        if self._takeover.until is not None:
            self._takeover.change_grace(self._takeover_grace)

    # ---- time

    def deadline(self) -> float | None:
        """Monotonic time at which the next ``Tick`` is wanted; None: none is."""
        due = min(self._groups.next_request_deadline(), self._judging_due())
        if self._takeover.until is None and self._verdict.until is not None:
            due = min(due, self._verdict.until)
        return None if due == NEVER else due

    def _judging_due(self) -> float:
        """When the next group will have been away or silent for too long; in a takeover grace, its end."""
        if self._takeover.until is not None:
            return max(self._takeover.until, self._awake_since)
        policy, groups, due = self.record.policy, self._groups, NEVER
        for silent in groups.by_session.values():
            due = self._heard_at(silent) + policy.heartbeat_timeout
            break
        for away in groups.suspects.values():
            due = min(due, away.closed_at + policy.reconnect_grace)
            break
        if self._round.left is not None:
            due = min(due, self._round.left[0] + policy.reconnect_grace)
        return max(due, self._awake_since)

    def _heard_at(self, group: Group) -> float:
        return max(group.heard_at, self._beats_counted_from)

    def _tick(self, now: float, now_unix: float) -> None:
        if self._verdict.until is not None and now >= self._verdict.until:
            self._settle(now, now_unix)  # who asked for as long as stragglers are waited for gets a quorum without them
        self._deny_overdue(now)
        due = self._judging_due()
        if now < due:
            return
        if now > due + LATE_SECONDS:
            self._awake_since = now + LATE_SECONDS
        elif self._takeover.until is not None:
            for replica_id in sorted(self._takeover.absent):
                self._give_up_absent(replica_id, "it did not come back after the lighthouse started anew")
            self._end_grace(now)
        else:
            self._judge_groups(now)

    def _deny_overdue(self, now: float) -> None:
        overdue = [(g, reasons.of_group(g, self._groups, self.record)) for g in self._groups.overdue(now)]
        why = self.reason(now)
        for group, own in overdue:
            if group.session is not None and group.request is not None:
                reason = own or why
                self._tell(group.session, Denied(group.request.request, "deadline", reason.sentence))
                self._log("denied", group.replica_id, code="deadline", reason=reason.sentence)
            self._groups.withdraw(group)

    def _judge_groups(self, now: float) -> None:
        policy = self.record.policy
        for group in list(self._groups.suspects.values()):
            if now < group.closed_at + policy.reconnect_grace:
                break
            self._lose(group, f"its connection ended and it did not come back in {policy.reconnect_grace:g} s", now)
        for group in list(self._groups.by_session.values()):
            if now < self._heard_at(group) + policy.heartbeat_timeout:
                break
            if group.session is not None:
                self._out.append(EndSession(group.session))
            self._lose(group, f"it said nothing for {policy.heartbeat_timeout:g} s", now)
        if self._round.left is not None and now >= self._round.left[0] + policy.reconnect_grace:
            _, group = self._round.left
            self._round.left = None
            self._break_round(f"{group.replica_id} left, so what it did not contribute will not come", group)

    def _end_grace(self, now: float) -> None:
        """Who was silent or away meanwhile is judged at the next tick; stragglers are late from now on."""
        self._takeover.end_grace()
        self._awake_since = now
        self._groups.clock_starts(now)

    def _give_up_absent(self, replica_id: str, reason: str) -> None:
        self._round.reports.add(replica_id)
        self._log("lost", replica_id, reason=reason, member=True)
        self._tell_lost(replica_id, reason)

    @property
    def _takeover_grace(self) -> float:
        policy = self.record.policy
        return policy.heartbeat_timeout if policy.takeover_grace is None else policy.takeover_grace

    # ---- forming a quorum

    def _settle(self, now: float, now_unix: float) -> None:
        self._lose_reported(now)
        record = self.record
        until, first = self._takeover.until, record.quorum_id == 0
        self._verdict = judge(self._groups, len(record.members), record.policy, until, now, first=first)
        if self._verdict.code in ANNOUNCING:
            self._announce(self._verdict.code, now, now_unix)
            self._verdict = judge(self._groups, len(self.record.members), record.policy, None, now)

    def _announce(self, code: Code, now: float, now_unix: float) -> None:
        groups, policy, before = self._groups, self.record.policy, self.record.quorum_id
        chosen = choose(groups, len(self.record.members), policy)
        comparison = self._verification.compare(chosen)
        if comparison is not None and policy.on_divergence != "report":
            self._mark_diverged(comparison)
        left_behind = self._next_quorum(chosen, now_unix)
        given_up = groups.give_up_heals() if code == "stragglers_dropped" else []
        left_out = groups.counted - len(chosen)
        room = policy.max_replicas - len(chosen) if policy.max_replicas else left_out
        joiners, verify = max(0, min(left_out, room)), self._verification.wanted
        announce = self._announcer.announce(chosen, self.record, joiners, verify=verify)
        self._verification.announced(announce)
        groups.close_round(announce, chosen, now)
        self._out.append(announce)
        self._takeover.forget_answers()
        self._round = Round()
        if left_behind:
            reason = f"quorum {before} is over, the job is at {announce.quorum_id}"
            self._out.append(Tell(left_behind, RoundBroken(before, reason)))
        names = sorted(g.replica_id for g in groups if g.kept_out is None and not g.member) if left_out else []
        self._formed = reasons.formed(code, announce.quorum_id, len(chosen), names)
        if announce.quorum_id != before:
            members = list(self.record.members)
            self._log("quorum", "", quorum_id=announce.quorum_id, members=members, reason=self._formed.sentence)
        for group in given_up:
            self._log("heal_given_up", group.replica_id, failed_heals=group.failed_heals + 1)
        if comparison is not None:
            self._tell_compared(comparison, policy.on_divergence)

    def _mark_diverged(self, comparison: Comparison) -> None:
        """From the quorum that is announced now they count as groups that have to heal."""
        for replica_id in comparison.diverged:
            group = self._groups.by_id[replica_id]
            group.diverged = not is_torn(group.lineage)

    def _tell_compared(self, comparison: Comparison, action: str) -> None:
        roots, diverged = comparison.roots, comparison.diverged
        facts: dict[str, Data] = {"step": comparison.step, "groups": sum(map(len, roots.values()))}
        facts |= {"missing": comparison.missing, "order": comparison.order}
        if len(roots) == 1:
            if comparison.order:
                facts["roots"] = roots  # of every K-th step the names of all groups would fill the log
            self._log("replicas_verified", "", **facts)
            return
        for replica_id in diverged:
            self._log("replica_diverged", replica_id, step=comparison.step, action=action)
            if action == "drain":
                self._drain(DrainOrdered(replica_id, "its weights differ from those of others", by="on_divergence"))
        what = action if diverged else "nothing: no root is that of more than half, so nobody can tell who is right"
        self._log("replicas_differ", "", **facts, roots=roots, diverged=diverged, action=what)

    def _next_quorum(self, chosen: list[Group], now_unix: float) -> tuple[int, ...]:
        """Makes ``chosen`` the quorum, under a new id where one is due, and has that written.

        Returns the sessions of members that are not in it and are at work under the quorum before.
        """
        record = self.record
        left_behind: tuple[int, ...] = ()
        same = len(chosen) == len(record.members) and all(group.member for group in chosen)
        requests = [group.request for group in chosen if group.request is not None]
        failed = any(request.commit_failures for request in requests)
        lineages = [one.lineage for one in requests if isinstance(one.lineage, int) and one.lineage < HIGHEST_QUORUM_ID]
        reached = max(lineages, default=0)  # above ours when states come from a job whose lighthouse is another
        if same and not failed and not self._round.lost and reached <= record.quorum_id:
            return ()
        if not same:
            left_behind = self._member_sessions(lambda group: group.request is None)
            self._set_members(chosen)
        members, created_ms = tuple(group.replica_id for group in chosen), int(now_unix * 1000)
        quorum_id = max(record.quorum_id, reached) + 1
        self._persist(replace(record, quorum_id=quorum_id, members=members, created_ms=created_ms))
        return left_behind

    def _set_members(self, members: list[Group]) -> None:
        self._groups.set_members(self.record.members, members)
        self._members = frozenset(group.replica_id for group in members)

    # ---- decisions

    def _tell(self, session: int, message: ToWorker) -> None:
        self._out.append(Tell((session,), message))

    def _persist(self, record: JobRecord) -> None:
        self.record = record
        self._out.append(Persist(record))

    def _log(self, kind: str, replica_id: str, **detail: Data) -> None:
        self._out.append(LogEntry(kind, replica_id, detail))

    # ---- questions

    def reason(self, now: float) -> Reason:
        """Why the next quorum is not formed yet; when nobody asks, how the last one was."""
        if not self._groups.asking_count and self._formed is not None:
            return self._formed
        return reasons.waiting(self._verdict, self._groups, self.record, self._takeover.absent, now)

    def quorum_view(self, now: float) -> QuorumView:
        last, groups = self._announcer.last, self._groups
        return QuorumView(
            quorum_id=self.record.quorum_id,
            created_ms=self.record.created_ms,
            members=self.record.members,
            step=last.step if last else 0,
            lineage=last.lineage if last else "",
            asking=tuple(group.replica_id for group in groups.all_asking()),
            healthy=groups.counted,
            joiners=sum(group.kept_out is None and not group.member for group in groups),
            reason=self.reason(now),
            formed=self._formed,
        )

    def replicas(self, now: float) -> tuple[ReplicaView, ...]:
        """Every incarnation once: those that are there, sorted by replica_id; behind them those that went within
        ``GONE_SECONDS``, the last first.
        """
        here = [replica_view(group, self._groups, self.record, now) for group in self._groups]
        here += [absent_view(replica_id) for replica_id in self._takeover.absent]
        seen, gone = {view.replica_id for view in here}, []
        for went, view in reversed(self._gone):
            if now - went <= GONE_SECONDS and view.replica_id not in seen:
                seen.add(view.replica_id)
                gone.append(older(view, now - went))
        return (*sorted(here, key=lambda view: view.replica_id), *gone)

    @property
    def tally(self) -> Tally:
        return self._groups.tally

    def heals(self, now: float) -> tuple[HealView, ...]:
        """Those under way, sorted by replica_id."""
        healing = ((group, group.heal) for _, group in sorted(self._groups.healing.items()))
        return tuple(heal_view(group, told, now) for group, told in healing if told is not None)

    # ---- invariants

    def validate(self) -> None:
        """Raises AssertionError with a sentence when something that always holds does not."""
        record, groups = self.record, self._groups
        groups.validate()
        assert list(record.members) == sorted(set(record.members)), "members of the quorum are unsorted or twice"
        assert self._members == set(record.members), "the members are not those of the record"
        assert all(g.member == (g.replica_id in self._members) for g in groups), "a group is wrongly marked as member"
        absent = self._takeover.absent
        assert not absent & set(groups.by_id), "a group that is there counts as absent"
        assert not absent or self._takeover.until is not None, "absent groups are waited for without an end"
        assert not set(groups.by_id) & set(record.evicted), "an evicted group is among the healthy"
        assert policy_problem(record.policy) is None, "the policy cannot be used"
        assert len(self._round.lost) <= len(record.members) + 1, "losses pile up"
        assert self._round.reports <= self._members, "a stranger reports a quorum broken"
        assert len(record.evicted) <= bans.MAX_EVICTED, "evicted incarnations pile up"
        assert all(g.session is not None for g in (*groups.asking.values(), *groups.passed_over.values())), (
            "a group asks without a session"
        )
        assert self._verdict.code not in ANNOUNCING, f"a quorum is due ({self._verdict.code}) and was not announced"
        assert not any(g.diverged and is_torn(g.lineage) for g in groups), "a torn group counts as a whole one"
        last = self._announcer.last
        if last is not None:
            assert last.listed, "an empty quorum was announced"
            assert last.quorum_id <= record.quorum_id, "a quorum was announced that is not in the record"
