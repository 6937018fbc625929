"""Groups whose step takes too long: ask for their stacks, name the rank and the line, end the group. Pure.

The limit is ``hang_after`` of the policy, or learned from the last steps. The time of a group counts from its last
answer; before its first one, or after its request was withdrawn, from the first look at it here; and while it heals,
from the last bytes that came. A group that works for half of the limit is asked for the stacks of its ranks, and again
every eighth of it, later less often; a job without late groups sends nothing. ``verdict`` decides. The group that hangs
gets an order to end, and the others go on without it, as after a loss. Its launcher starts it again. The third time
within an hour its name is banned for an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from keepstep_lighthouse.quorum.events import EvictOrdered
from keepstep_lighthouse.quorum.groups.group import ASKING, Exclusion, Group, State
from keepstep_lighthouse.quorum.groups.groups import NEVER
from keepstep_lighthouse.quorum.hangs.verdict import (
    NOTHING,
    OWN_LIMIT,
    Standing,
    Verdict,
    judge,
    waits_for_others,
)
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import bans
from keepstep_lighthouse.quorum.presence.departures import HUNG, Departures
from keepstep_mesh.protocol.lineage import origin
from keepstep_mesh.protocol.stack_messages import Hung, RankStacks, StacksRequest, bounded

LEAST_HANG_SECONDS = 60.0
"""Least limit that is learned."""
LEARNED_FACTOR = 5.0
KEPT_STEPS = 1000
"""Number of steps from which the limit is learned."""
MOVED_FACTOR = 2.0
"""The longest step is stored again when it has changed by this factor."""
FIRST_STEPS = 3
"""Steps of a group in which it may compile, allocate, and start its workers."""
ASKED_PER_LIMIT = 8
ASKED_PER_TIME = 16
"""A group that was late for long is asked after this part of its time."""
MAX_ASKED = 256
"""Number of groups that are asked at once."""
MAX_RANKS = 4096
"""Number of ranks of a group of which answers are kept."""
HANGS_PER_HOUR = 3
HOUR = 3600.0
BY = "the lighthouse"

Turn = tuple[int, State, int]
"""Request, state, and healed bytes of a group: they change when it goes on."""


@dataclass(slots=True)
class Answers:
    """The last answer of a rank."""

    found: RankStacks
    since: float
    """When the first of the equal ones arrived."""
    acts_since: float
    """When the rank began to act, after it had waited for others; when its step began, if it has not waited."""
    equal: int = 1
    """Answers in a row with the same stack of the training thread."""
    total: int = 1


@dataclass(slots=True)
class Late:
    """A group whose step takes long."""

    since: float
    """When its step began."""
    asked_at: float = -NEVER
    ranks: dict[int, Answers] = field(default_factory=dict)
    spared: str = ""
    """Why it is not ended although it hangs, as it was logged; empty: it does not hang."""


class Hangs:
    def __init__(self, job: JobState, departures: Departures) -> None:
        self._job, self._departures = job, departures
        self.stacks: dict[str, dict[int, RankStacks]] = {}
        """The last answers by replica_id and rank, of groups that are here."""
        self.verdict: Verdict = NOTHING
        """On the groups that are late."""
        self._late: dict[str, Late] = {}
        self._turns: dict[str, tuple[Turn, float]] = {}
        """Of the groups that have not asked, and since when."""
        self._steps: deque[float] = deque(filter(None, [job.record.longest_step]), KEPT_STEPS)
        self._unusual = False
        """The length of the present round says nothing about others: a group hung, or had a limit of its own."""
        self._due = NEVER
        self.number = 0
        """Of the last request for stacks."""
        self._hung: dict[str, deque[float]] = {}
        """When groups hung within the last hour, by name."""

    @property
    def limit(self) -> float:
        """Seconds after which a group hangs; 0: never."""
        ordered = self._job.record.policy.hang_after
        return max(LEAST_HANG_SECONDS, LEARNED_FACTOR * max(self._steps, default=0.0)) if ordered is None else ordered

    # ---- events

    def arm(self, now: float) -> None:
        """A group came, or the policy changed: look again within an eighth of the limit."""
        if limit := self.limit:
            self._due = min(self._due, now + limit / ASKED_PER_LIMIT)

    def round_begins(self, now: float) -> None:
        """A quorum was announced. Learn from the round that ended. O(1)."""
        began = self._job.round.began
        if began is not None and not self._unusual:
            self._steps.append(now - began)
        self._unusual = False

    def ask(self, target: str) -> None:
        """Ask the groups that ``target`` names for their stacks; empty: all."""
        self._ask(self._job.groups.matching(target) if target else self._job.groups)

    def answered(self, group: Group, found: RankStacks, now: float) -> None:
        """The stacks of a rank arrived."""
        known_ranks = self.stacks.setdefault(group.replica_id, {})
        if found.rank not in known_ranks and len(known_ranks) == MAX_RANKS:
            return
        known_ranks[found.rank] = found = bounded(found)
        late = self._late.get(group.replica_id)
        if late is None:
            return
        known = late.ranks.get(found.rank)
        if known is None:
            late.ranks[found.rank] = Answers(found, now, late.since)
            return
        acts_since = now if waits_for_others(known.found) and not waits_for_others(found) else known.acts_since
        since, equal = (known.since, known.equal + 1) if _training(known.found) == _training(found) else (now, 1)
        late.ranks[found.rank] = Answers(found, since, acts_since, equal, known.total + 1)

    def deadline(self) -> float:
        """Return when to look again; NEVER: no group is here, or groups never hang."""
        return self._due

    def check(self, now: float, now_unix: float) -> None:
        """Look which groups are late: ask for their stacks, and end those that hang."""
        if now < self._due:
            return
        limit, groups = self.limit, self._job.groups
        self.stacks = {one: found for one, found in self.stacks.items() if one in groups.by_id}
        if now > self._due + limit / ASKED_PER_LIMIT:  # the lighthouse stood, and may not have heard the answers
            self._late = {}
        self._due = now + limit / ASKED_PER_LIMIT if limit and len(groups) else NEVER
        self._remember()
        self._turns = {one.replica_id: self._turn(one, now) for one in groups if one.state is not ASKING}
        late = [one for one in groups if limit and self._seconds(one, now) >= limit / 2 and _may_hang(one)]
        self._note_late(late)
        if not late:
            self.verdict = NOTHING
            return
        others = sum(one.session is not None and one.excluded is None for one in groups if one not in late)
        standings = self._standings(late, now)
        self._unusual |= any(one.found.section or one.found.waits in OWN_LIMIT for one in standings)
        closed = self._job.record.closed is not None  # then no group has to go on
        self.verdict = judge(standings, others + closed, limit)
        self._act(now, now_unix)
        self._ask_late(now, limit)

    def sentences(self) -> dict[str, str]:
        """Return who holds up the job, and in which line, by replica_id."""
        groups, verdict = self._job.groups, self.verdict
        found: dict[str, str] = {}
        for one in verdict.suspects or verdict.left_alone:
            if one.replica_id in groups.by_id:
                found[one.replica_id] = "; ".join(filter(None, (found.get(one.replica_id), one.sentence)))
        if not verdict.suspects:
            ahead = (
                ", ".join(one.replica_id for one in groups if one.member and one.state == ASKING) or "no other group"
            )
            return {replica_id: f"{sentence}; went on without it: {ahead}" for replica_id, sentence in found.items()}
        spared = {replica_id: late.spared for replica_id, late in self._late.items() if late.spared}
        return {
            one: f"{said}; it is not ended: {spared[one]}" if one in spared else said for one, said in found.items()
        }

    def _remember(self) -> None:
        """Store the longest step for the next lighthouse, if it tells another limit."""
        if not self._steps or self._job.record.policy.hang_after is not None:
            return
        record, longest = self._job.record, max(*self._steps, LEAST_HANG_SECONDS / LEARNED_FACTOR)
        if not longest / MOVED_FACTOR < record.longest_step < longest * MOVED_FACTOR:
            self._job.persist(replace(record, longest_step=longest))

    # ---- late groups

    def begin_again(self, group: Group) -> None:
        """Count the time of a group again, from its ``working_since``."""
        self._turns.pop(group.replica_id, None)

    def _turn(self, group: Group, now: float) -> tuple[Turn, float]:
        """Return where the group is, and since when."""
        heal = group.heal
        turn = group.highest_request, group.state, 0 if heal is None else heal.progress.bytes_done
        known = self._turns.get(group.replica_id)
        if known is not None and known[0] == turn:
            return known
        return turn, now if heal is not None or group.working_since is None else group.working_since

    def _seconds(self, group: Group, now: float) -> float:
        known = self._turns.get(group.replica_id)
        return now - known[1] if known is not None else 0.0

    def _note_late(self, late: list[Group]) -> None:
        before, self._late = self._late, {}
        for group in late:
            since = self._turns[group.replica_id][1]
            known = before.get(group.replica_id)
            self._late[group.replica_id] = known if known is not None and known.since == since else Late(since)

    def _standings(self, late: list[Group], now: float) -> list[Standing]:
        return [
            Standing(
                replica_id=group.replica_id,
                seconds=self._seconds(group, now),
                acted=now - rank.acts_since,
                found=rank.found,
                answers=rank.equal,
                same_for=now - rank.since,
                total=rank.total,
                learned=self._has_learned(group, rank.found),
                round=_round(group),
            )
            for group in late
            for _, rank in sorted(self._late[group.replica_id].ranks.items())
        ]

    def _has_learned(self, group: Group, found: RankStacks) -> bool:
        """Return whether the first steps of a group have ended. After a takeover only its ranks know."""
        known = bool(self._steps) or self._job.record.policy.hang_after is not None
        return max(group.committed, found.commits if known else 0) >= FIRST_STEPS

    def _ask_late(self, now: float, limit: float) -> None:
        """Ask the late groups, those first that were not asked for longest."""
        due: list[Group] = []
        for replica_id, late in sorted(self._late.items(), key=lambda one: one[1].asked_at):
            pause = max(limit / ASKED_PER_LIMIT, (now - late.since) / ASKED_PER_TIME)
            is_due = now - late.asked_at > pause - limit / ASKED_PER_LIMIT / 2  # rounded to the turns of ``check``
            if is_due and (group := self._job.groups.by_id.get(replica_id)) is not None:
                due.append(group)
        for group in due[:MAX_ASKED]:
            self._late[group.replica_id].asked_at = now
        self._ask(due)

    def _ask(self, groups: Iterable[Group]) -> None:
        self.number += 1
        sessions = [one.session for one in groups if one.session is not None][:MAX_ASKED]
        if sessions:
            self._job.tell_all(tuple(sessions), StacksRequest(self.number))

    # ---- groups that hang

    def _act(self, now: float, now_unix: float) -> None:
        for replica_id in dict.fromkeys(one.replica_id for one in self.verdict.hang):
            ranks = [one for one in self.verdict.hang if one.replica_id == replica_id]
            group, late = self._job.groups.by_id[replica_id], self._late[replica_id]
            spared = self.verdict.spared or self._needed(group)
            if not spared:
                self._end(group, ranks, now, now_unix)
            elif not late.spared:
                late.spared, self._unusual = spared, True
                self._log(ranks, ended=False, why=spared)

    def _needed(self, group: Group) -> str:
        """Return why the others could not go on without what this group holds; empty: they could."""
        groups, hang = self._job.groups, {one.replica_id for one in self.verdict.hang}
        stay = [one for one in groups if one.session is not None and one.excluded is None]
        members = {one.replica_id for one in stay if one.member and one is not group}
        if group.member and groups.sources.needs(group.replica_id, {*members, group.replica_id}):
            return "no other group has its shards of the model"
        unknown = group.member and group.answer is None  # after a takeover
        held = [self._held(one) for one in stay if one.replica_id not in hang and (one.member or not unknown)]
        least = (0, 1) if unknown else _asked_with(group)
        return "no other group has the state of the job" if max(held, default=(0, 0)) < least else ""

    def _held(self, group: Group) -> tuple[int, int]:
        """Return the last resume and the step of the weights that the group has. It may have healed since it asked."""
        late = self._late.get(group.replica_id)
        told = min((one.found.step for one in late.ranks.values()), default=0) if late is not None else 0
        if told <= group.live_step:
            return _asked_with(group)
        return origin(group.lineage if group.answer is None else group.answer.announce.lineage).resumed, told

    def _end(self, group: Group, ranks: list[Standing], now: float, now_unix: float) -> None:
        reason = ranks[0].sentence
        self._hung = {name: times for name, times in self._hung.items() if now - times[-1] < HOUR}
        times = self._hung.setdefault(group.name, deque(maxlen=HANGS_PER_HOUR))
        times.append(now)
        ban = HOUR if len(times) == HANGS_PER_HOUR and now - times[0] < HOUR else 0.0
        if ban:
            why = f"it hung {HANGS_PER_HOUR} times within an hour, the last time: {reason}"
            order = EvictOrdered(group.name, why, ban, BY)
            self._job.persist(bans.evict(self._job.record, [group.replica_id], order, now_unix))
        self._unusual = True
        self._log(ranks, ended=True, ban_seconds=ban)
        if group.session is not None:
            self._job.tell(group.session, Hung(reason, ban))
            self._job.end(group.session)
        self._departures.lose(group, f"it hangs: {reason}", now, HUNG)
        if ban:
            self._departures.expect_no_longer(group.name)
        self.verdict = replace(
            self.verdict, suspects=tuple(one for one in self.verdict.suspects if one.replica_id != group.replica_id)
        )

    def _log(self, ranks: list[Standing], *, ended: bool, ban_seconds: float = 0.0, why: str = "") -> None:
        first = ranks[0]
        self._job.log(
            "hung",
            first.replica_id,
            rank=first.found.rank,
            line=first.found.line,
            seconds=round(first.seconds, 1),
            reason=first.sentence,
            ended=ended,
            spared=why,
            ban_seconds=ban_seconds,
        )


def _asked_with(group: Group) -> tuple[int, int]:
    """Return the last resume and the step of the live weights with which the group asked; (0, 0): it had none.

    A group that missed a resume may have taken more steps than the job has.
    """
    return (origin(group.lineage).resumed, group.live_step) if group.live_step else (0, 0)


def _may_hang(group: Group) -> bool:
    """Return whether anyone waits for the group, or will: other groups, or a launcher."""
    excluded = group.excluded is not None and not group.is_excluded(Exclusion.SPARE)
    return group.session is not None and not excluded and not group.told_closed


def _round(group: Group) -> tuple[int, int] | None:
    if group.answer is None or group.working_since is None:
        return None
    return group.answer.announce.quorum_id, group.answer.announce.step


def _training(found: RankStacks) -> object:
    """Return what stays the same while a rank hangs: its stack, without the line of the innermost function."""
    frames = found.stacks[0].frames if found.stacks else ()
    innermost = (frames[-1].partition(":")[0], frames[-1].partition(" ")[2]) if frames else ()
    return frames[:-1], innermost, found.step, found.collectives, found.section, found.work
