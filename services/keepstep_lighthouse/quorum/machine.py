"""Pass each event to the feature that it concerns, and answer questions about the job. Pure.

Rules that all features keep:

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
"""

from __future__ import annotations

from dataclasses import replace

from keepstep_lighthouse.quorum import heals, requests, stragglers
from keepstep_lighthouse.quorum.events import (
    Announce,
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
    ShardsReported,
    StacksOrdered,
    StacksReported,
    StragglerFound,
    Tick,
    VerifyOrdered,
)
from keepstep_lighthouse.quorum.features import Features
from keepstep_lighthouse.quorum.forming.quorum_rules import ANNOUNCING, Verdict
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.groups.groups import NEVER
from keepstep_lighthouse.quorum.groups.tally import Tally
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.presence.departures import BROKEN
from keepstep_lighthouse.quorum.settling import Settling
from keepstep_lighthouse.quorum.views import job_status, reasons
from keepstep_lighthouse.quorum.views.job_status import JobStatus
from keepstep_lighthouse.quorum.views.replicas import (
    HealView,
    QuorumView,
    ReplicaView,
    gone_sentences,
    heal_views,
    quorum_view,
    replica_views,
)
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.stack_messages import RankStacks


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
        features = self._features = Features(replace(record, bans=bans), now, now_unix)
        self._state, self._groups, self._takeover = features.job, features.job.groups, features.takeover
        self._settling = Settling(features)
        if restarted and record.members and record.ended is None and record.closed is None:
            self._takeover.wait(record.members, now, fenced_until)

    @property
    def record(self) -> JobRecord:
        """The record, pending writes included."""
        return self._state.record

    # ---- events

    def handle(self, event: Event, now: float, now_unix: float) -> list[Decision]:
        """Return the decisions for ``event``. ``now``: monotonic seconds; ``now_unix``: Unix seconds."""
        job, features = self._state, self._features
        decisions = job.decisions = []
        match event:
            case Asked(session, request):
                if (group := self.heard(session, now)) is not None:
                    requests.ask(features, group, request, now)
            case Heard(session):
                self.heard(session, now)
                return decisions
            case Opened():
                features.arrivals.open_session(event, now, now_unix)
                features.hangs.arm(now)
            case Closed(session):
                if (group := self._groups.by_session.get(session)) is not None:
                    self._groups.disconnect(group, now)
                    job.log("suspect", group.replica_id, member=group.member)
                    features.ports.probe(group, session)
            case PortAnswered():
                features.ports.answered(event)
            case PortRefused():
                features.ports.refused(event, now)
            case HealProgress(session, told):
                if (group := self.heard(session, now)) is not None:
                    heals.progressed(job, group, told, now)
            case ShardsReported(session, told):
                if (group := self.heard(session, now)) is not None:
                    features.shards.reported(group, told, now)
            case StacksReported(session, found):
                if (group := self.heard(session, now)) is not None:
                    features.hangs.answered(group, found, now)
                return decisions
            case StacksOrdered(target):
                features.hangs.ask(target)
                return decisions
            case Cancelled(session, number):
                if (group := self.heard(session, now)) is not None:
                    requests.cancel(job, group, number)
            case LeftOnPurpose(session):
                if (group := self.heard(session, now)) is not None:
                    features.departures.leave(group, event, now)
            case MovedAway(session):
                if (group := self.heard(session, now)) is not None:
                    features.departures.move(group, now)
            case GroupFailed(session, reason):
                if (group := self.heard(session, now)) is not None:
                    job.end(session)
                    features.departures.lose(group, f"it failed: {reason}", now, BROKEN)
            case EvictOrdered():
                features.orders.evict(event, now, now_unix)
            case DrainOrdered(target, reason, by):
                job.drain(target, reason, by)
            case ReplaceOrdered():
                features.spares.replace(event)
            case ReadmitOrdered():
                features.orders.readmit(event, now_unix)
            case PolicyOrdered():
                features.orders.change_policy(event, now)
                features.hangs.arm(now)
            case VerifyOrdered(by):
                features.verification.order(by)
            case ReopenOrdered():
                features.finishing.reopen(event)
            case StragglerFound():
                stragglers.drain(job, event)
            case Tick():
                self._tick(now, now_unix)
        self._settling.settle(now, now_unix)
        return decisions

    def heard(self, session: int, now: float) -> Group | None:
        """Note that a frame of the session arrived, and return its group; None: the session has ended."""
        group = self._groups.heard(session, now)
        if group is not None and self._takeover.until is not None:
            self._takeover.heard(group, now)
        return group

    def answered(self, announce: Announce, now: float) -> None:
        """Note that a round is announced only now, after the store took its time. The step of its groups begins now."""
        for group in self._groups.by_id.values():
            if group.answer is not None and group.answer.announce is announce and group.working_since is not None:
                group.working_since = now
                self._features.hangs.begin_again(group)

    # ---- time

    def deadline(self) -> float | None:
        """Return the monotonic time of the next ``Tick``; None: no tick is needed."""
        features = self._features
        due = min(self._groups.next_request_deadline(), features.health.deadline(), features.hangs.deadline())
        partings = self._features.probation.partings
        if partings.groups:
            due = min(due, partings.due())
        if self._takeover.until is None and self._settling.verdict.until is not None:
            due = min(due, self._settling.verdict.until)
        return None if due == NEVER else due

    def _tick(self, now: float, now_unix: float) -> None:
        if self._settling.verdict.until is not None and now >= self._settling.verdict.until:
            self._settling.settle(
                now, now_unix
            )  # a request whose deadline is that of the stragglers gets a quorum without them
        self._deny_overdue(now)
        self._features.health.check(now)
        self._features.hangs.check(now, now_unix)

    def _deny_overdue(self, now: float) -> None:
        overdue = [(g, reasons.of_group(g, self._groups, self.record, now)) for g in self._groups.overdue(now)]
        if not overdue:  # after most ticks
            return
        why = self.reason(now)
        for group, own in overdue:
            sentence = own.sentence if own else reasons.too_late(why)
            self._state.deny(group, "deadline", sentence, logged=not group.stands_by)  # a spare asks again and again

    # ---- questions

    def reason(self, now: float) -> Reason:
        """Return why the next quorum is not formed yet; if no group asks, how the last one was formed."""
        if (closed := self.record.closed) is not None:
            return reasons.closed(closed)
        if not self._groups.asking_count and self._settling.formed is not None:
            return self._settling.formed.reason
        return self._waits(self._settling.verdict, now)

    def _waits(self, verdict: Verdict, now: float) -> Reason:
        lost = self._features.departures.expected(now)
        return reasons.waiting(verdict, self._groups, self.record, self._takeover.absent, now, lost)

    def quorum_view(self, now: float) -> QuorumView:
        absent, last = self._takeover.absent, self._state.last
        formed = None if self._settling.formed is None else self._settling.formed.reason
        gone = gone_sentences(self._features.departures.gone, self._groups, now)
        hangs = self.hang_sentences()
        return quorum_view(self._groups, self.record, absent, last, self.reason(now), formed, gone, hangs)

    def status(self, now: float, now_unix: float) -> JobStatus:
        """Return whether the job runs, and if not, how it ended."""
        state, until = self._state, self._takeover.until
        verdict = self._settling.verdict if until is None else Verdict("takeover_grace", until)
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
        hangs, absent = self._features.hangs.sentences(), self._takeover.absent
        return replica_views(self._groups, self.record, absent, self._features.departures.gone, hangs, now)

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
        found = self._groups.matching(target)
        return self._features.spares.refusal(found[0]) if found else f"{target} is not connected"

    def hang_sentences(self) -> tuple[str, ...]:
        """Return which groups hold up the job, and in which line, a sentence each."""
        return tuple(self._features.hangs.sentences().values())

    def held_up(self) -> dict[tuple[str, int], float]:
        """Return the seconds for which ranks hold up the job, by name of the group and rank, as of the last look."""
        suspects = self._features.hangs.verdict.suspects
        return {(name_of(one.replica_id), one.found.rank): one.seconds for one in suspects}

    def stacks(self, target: str, number: int) -> dict[str, tuple[int, dict[int, RankStacks]]]:
        """Return the answers of connected groups to request ``number``, and later ones.

        Args:
            target: a stable name or one incarnation; empty: all groups.
            number: see ``StacksRequest``.

        Returns:
            By replica_id: the number of ranks, and the answers by rank.
        """
        known = self._features.hangs.stacks
        return {
            one.replica_id: (
                max(1, one.info.world_size),
                {rank: found for rank, found in known.get(one.replica_id, {}).items() if found.number >= number},
            )
            for one in (self._groups.matching(target) if target else self._groups)
            if one.session is not None
        }

    def last_stacks(self, replica_id: str) -> tuple[RankStacks, ...]:
        """Return the last stacks of a group that was late, or lately so, by rank."""
        known = self._features.hangs.stacks.get(replica_id, {})
        return tuple(known[rank] for rank in sorted(known))

    @property
    def stack_request(self) -> int:
        """Number of the last request for stacks."""
        return self._features.hangs.number

    @property
    def incomparable(self) -> bool:
        """Whether each group holds other shards of the model, so that their weights cannot be compared."""
        return bool(self._groups.sources)

    @property
    def tally(self) -> Tally:
        return self._groups.tally

    def heals(self, now: float) -> tuple[HealView, ...]:
        """Return the heals in progress, sorted by replica_id."""
        return heal_views(self._groups, now)

    # ---- invariants

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        self._features.validate()
        code = self._settling.verdict.code
        assert code not in ANNOUNCING, f"a quorum is due ({code}) and was not announced"
