"""Who is there: the groups that the lighthouse knows, counted so that the rules never have to look at all of them.

A group is *counted* (healthy in the sense of the rules) from its hello until it leaves or is lost, unless something
keeps it out: an older incarnation of its name, or a layout or settings that do not fit the job. A counted group is
*asking* while it has an open request and *healing* while it reports progress instead.

Every change of a group goes through a method here; ``validate`` counts all again.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from keepstep_lighthouse.quorum.events import Announce
from keepstep_mesh.protocol.membership import Lineage, MemberInfo
from keepstep_mesh.protocol.messages import Healing, QuorumRequest
from keepstep_mesh.protocol.names import name_of

NEVER = float("inf")
MAX_REMEMBERED_HEALS = 1000


class KeptOut(Enum):
    DUPLICATE_NAME = "duplicate_name"
    LAYOUT = "layout"


@dataclass(slots=True, eq=False)
class Group:
    """One incarnation. Only ``Groups`` changes what it counts: session, request, healing, member, kept_out."""

    replica_id: str
    name: str
    arrived: int
    """Ordinal of its hello: lower is older."""
    member: bool
    """Of the current quorum."""
    session: int | None = None
    """None: its connection ended at ``closed_at`` and it may come back."""
    heard_at: float = 0.0
    closed_at: float = 0.0
    info: MemberInfo = field(default_factory=MemberInfo)
    settings: str = ""
    """As in its request; empty: unknown."""
    misfit: str = ""
    """Kept out for its layout or settings: what does not fit, as a sentence."""
    step: int = 0
    lineage: Lineage = ""
    request: QuorumRequest | None = None
    """The open one."""
    asked_at: float = 0.0
    highest_request: int = -1
    answer: Announce | None = None
    """What it was last answered, ``answered_request`` on ``answered_session``."""
    answered_request: int = -1
    answered_session: int = -1
    answered_at: float | None = None
    step_seconds: float | None = None
    """From its last answer to its next request."""
    committed: int = 0
    """Steps, each from an answer of this lighthouse to the next request."""
    healing: Healing | None = None
    """What it said last of its heal, until its next request."""
    heal_began: float = 0.0
    failed_heals: int = 0
    """Of its name, when this heal began."""
    heal_given_up: bool = False
    """A quorum was formed without it: nobody waits for this heal any more."""
    draining: str | None = None
    """The reason given with the drain."""
    kept_out: KeptOut | None = None
    diverged: bool = False
    """Its weights were found to differ from those of the other groups, and it has not moved on from that state."""

    @property
    def heal(self) -> Healing | None:
        """The one that is under way."""
        return None if self.healing is None or self.healing.ended else self.healing


@dataclass(slots=True)
class Tally:
    """Sums since this lighthouse leads, over all groups; in seconds."""

    waits: int = 0
    """Requests that were answered with a quorum."""
    wait_seconds: float = 0.0
    """From a group's request to its answer."""
    committed: int = 0
    """Steps of groups, each from an answer to the next request."""
    discarded: int = 0
    step_seconds: float = 0.0
    """All of these steps together."""


class Groups:
    """All groups of one job that are healthy or may still come back within the reconnect grace."""

    def __init__(self) -> None:
        self.by_id: dict[str, Group] = {}
        self.by_name: dict[str, list[Group]] = {}
        self.by_session: OrderedDict[int, Group] = OrderedDict()
        """In the order in which they were last heard."""
        self.suspects: dict[str, Group] = {}
        """In the order in which their connections ended."""
        self.asking: dict[str, Group] = {}
        """In the order in which they asked, since the last quorum was announced."""
        self.passed_over: dict[str, Group] = {}
        """Asking too, but since before the last quorum was announced without them, or since before they counted. Nobody
        was late for these requests: they start no straggler's clock."""
        self.healing: dict[str, Group] = {}
        self.counted = 0
        self.members_asking = 0
        self.shrinking = 0
        """Asking with shrink_only."""
        self.heals_waited_for: Counter[int] = Counter()
        """How many healing groups the next quorum waits for, by failed tries of their name."""
        self.failed_heals: OrderedDict[str, int] = OrderedDict()
        """By stable name; a heal that was completed forgets."""
        self.tally = Tally()
        self._clock_start = 0.0
        self._arrivals = 0
        self._deadlines: list[tuple[float, str, int]] = []
        """Heap of (deadline, replica_id, request); entries of requests that are open no longer are skipped."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_id.values())

    # ---- connections

    def add(self, replica_id: str, session: int, now: float, *, member: bool) -> Group:
        self._arrivals += 1
        group = Group(replica_id, name_of(replica_id), self._arrivals, member, session, now)
        self.by_id[replica_id] = group
        self.by_session[session] = group
        self.counted += 1
        namesakes = self.by_name.setdefault(group.name, [])
        namesakes.append(group)
        self._settle_name(namesakes)
        return group

    def connect(self, group: Group, session: int, now: float) -> None:
        """A connection of a group that is known; the one before is forgotten, its request with it."""
        self.disconnect(group, now)
        del self.suspects[group.replica_id]
        group.session = session
        group.highest_request = -1  # a client without incarnations may have been restarted, and counts anew
        group.heard_at = now
        self.by_session[session] = group

    def disconnect(self, group: Group, now: float) -> None:
        if group.session is None:
            return
        self.withdraw(group)
        del self.by_session[group.session]
        group.session = None
        group.closed_at = now
        self.suspects[group.replica_id] = group

    def heard(self, group: Group, now: float) -> None:
        group.heard_at = now
        if group.session is not None:
            self.by_session.move_to_end(group.session)

    def remove(self, group: Group) -> None:
        """The group is gone; a namesake that it kept out is counted from now on."""
        self.withdraw(group)
        self._stop_healing(group)
        del self.by_id[group.replica_id]
        self.suspects.pop(group.replica_id, None)
        if group.session is not None:
            del self.by_session[group.session]
        self.counted -= group.kept_out is None
        namesakes = self.by_name[group.name]
        namesakes.remove(group)
        if namesakes:
            self._settle_name(namesakes)
        else:
            del self.by_name[group.name]

    # ---- what keeps a group out

    def keep_out(self, group: Group, why: KeptOut | None) -> None:
        if group.kept_out is why:
            return
        self._uncount_request(group)
        self._stop_healing(group)
        self.counted += (why is None) - (group.kept_out is None)
        group.kept_out = why
        self._count_request(group, self.passed_over)

    def _settle_name(self, namesakes: list[Group]) -> None:
        oldest = min(namesakes, key=lambda group: (not group.member, group.arrived))
        for group in namesakes:
            if group is not oldest:
                self.keep_out(group, KeptOut.DUPLICATE_NAME)
            elif group.kept_out is KeptOut.DUPLICATE_NAME:
                self.keep_out(group, None)

    def namesake(self, group: Group) -> Group:
        """The incarnation of this name that counts."""
        return next(other for other in self.by_name[group.name] if other.kept_out is not KeptOut.DUPLICATE_NAME)

    # ---- requests

    def open(self, group: Group, request: QuorumRequest, now: float) -> None:
        self.withdraw(group)
        if group.healing is not None and not group.heal_given_up and request.commit_failures == 0:
            self.failed_heals.pop(group.name, None)
        healed = group.healing is not None and group.healing.ended and not group.healing.error
        self._stop_healing(group)
        group.heal_given_up = False
        if group.answered_at is not None:
            group.step_seconds, group.answered_at = now - group.answered_at, None
            self.tally.step_seconds += group.step_seconds
            # who asks for the same step again, without a failure, has waited for heals before it
            committed = request.commit_failures == 0 and not (group.answer and request.step == group.answer.step)
            group.committed += committed
            self.tally.committed += committed
            self.tally.discarded += request.commit_failures > 0
        group.request = request
        group.highest_request = max(group.highest_request, request.request)
        group.asked_at = now
        stands_still = (group.step, group.lineage) == (request.step, request.lineage)
        group.diverged = group.diverged and stands_still and not healed
        group.step = request.step
        group.lineage = request.lineage
        heapq.heappush(self._deadlines, (now + request.timeout_ms / 1000, group.replica_id, request.request))
        if len(self._deadlines) > 64 + 2 * len(self.by_id):
            self._drop_stale_deadlines()
        self._count_request(group, self.asking)

    def withdraw(self, group: Group) -> None:
        """The group asks no longer."""
        self._uncount_request(group)
        group.request = None

    def _count_request(self, group: Group, where: dict[str, Group]) -> None:
        if group.kept_out is None and group.request is not None:
            where[group.replica_id] = group
            self.members_asking += group.member
            self.shrinking += group.request.shrink_only

    def _uncount_request(self, group: Group) -> None:
        if group.kept_out is None and group.request is not None:
            if self.asking.pop(group.replica_id, None) is None:
                del self.passed_over[group.replica_id]
            self.members_asking -= group.member
            self.shrinking -= group.request.shrink_only

    @property
    def asking_count(self) -> int:
        return len(self.asking) + len(self.passed_over)

    def all_asking(self) -> list[Group]:
        """Sorted by replica_id."""
        return sorted([*self.asking.values(), *self.passed_over.values()], key=lambda group: group.replica_id)

    def first_asked(self) -> float | None:
        """When the first group asked since the last quorum; None while none has."""
        for group in self.asking.values():
            return max(group.asked_at, self._clock_start)
        return None

    def clock_starts(self, now: float) -> None:
        """No group is late for requests made before: a quorum could not have been formed."""
        self._clock_start = now

    def close_round(self, announce: Announce, chosen: list[Group], now: float) -> None:
        """``chosen`` are answered; who asks and is not among them goes on asking."""
        for group in chosen:
            if group.request is not None:
                group.answered_request = group.request.request
                self.tally.waits += 1
                self.tally.wait_seconds += now - group.asked_at
            group.answer = announce
            group.answered_session = -1 if group.session is None else group.session
            group.answered_at = now
            group.request = None
        left = [group for group in (*self.passed_over.values(), *self.asking.values()) if group.request is not None]
        self.asking = {}
        self.passed_over = {group.replica_id: group for group in left}
        self.members_asking = sum(group.member for group in left)
        self.shrinking = sum(group.request.shrink_only for group in left if group.request is not None)
        self._drop_stale_deadlines()

    def set_members(self, before: tuple[str, ...], members: list[Group]) -> None:
        """Another quorum: ``members`` instead of ``before``."""
        for replica_id in before:
            if (group := self.by_id.get(replica_id)) is not None:
                group.member = False
        for group in members:
            group.member = True
        self.members_asking = sum(group.member for group in (*self.asking.values(), *self.passed_over.values()))

    def next_request_deadline(self) -> float:
        while self._deadlines:
            deadline, replica_id, number = self._deadlines[0]
            if self._is_open(replica_id, number):
                return deadline
            heapq.heappop(self._deadlines)
        return NEVER

    def overdue(self, now: float) -> list[Group]:
        """The groups whose request has reached its deadline, earliest first. To be withdrawn: they are named once."""
        due: dict[str, Group] = {}
        while self.next_request_deadline() <= now:
            _, replica_id, _ = heapq.heappop(self._deadlines)
            due[replica_id] = self.by_id[replica_id]
        return list(due.values())

    def _is_open(self, replica_id: str, number: int) -> bool:
        group = self.by_id.get(replica_id)
        return group is not None and group.request is not None and group.request.request == number

    def _drop_stale_deadlines(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if self._is_open(entry[1], entry[2])]
        heapq.heapify(self._deadlines)

    # ---- healing

    def progress(self, group: Group, told: Healing, now: float) -> None:
        """The group reports that it heals. Ignored from a group that asks or is kept out, or whose heal has ended."""
        if group.request is not None or group.kept_out is not None or (group.healing and group.healing.ended):
            return
        if group.healing is None:
            self.healing[group.replica_id] = group
            group.heal_began = now - told.seconds
            group.failed_heals = self.failed_heals.get(group.name, 0)
            if not group.heal_given_up:
                self.heals_waited_for[group.failed_heals] += 1
        group.healing = told

    def give_up_heals(self) -> list[Group]:
        """A quorum is formed without those that still heal: the limit of their next try is doubled."""
        given_up = [group for group in self.healing.values() if not group.heal_given_up and group.heal is not None]
        for group in self.healing.values():
            group.heal_given_up = True
        for group in given_up:
            self.failed_heals[group.name] = group.failed_heals + 1
            self.failed_heals.move_to_end(group.name)
        self.heals_waited_for.clear()
        while len(self.failed_heals) > MAX_REMEMBERED_HEALS:
            self.failed_heals.popitem(last=False)
        return given_up

    def _stop_healing(self, group: Group) -> None:
        if group.healing is None:
            return
        del self.healing[group.replica_id]
        group.healing = None
        if not group.heal_given_up:
            self.heals_waited_for[group.failed_heals] -= 1
            if not self.heals_waited_for[group.failed_heals]:
                del self.heals_waited_for[group.failed_heals]

    # ---- invariants

    def validate(self) -> None:
        """Raises AssertionError with a sentence when a count or an index does not fit the groups."""
        groups = list(self)
        asking = [g for g in groups if g.request is not None and g.kept_out is None]
        assert self.counted == sum(g.kept_out is None for g in groups), "counted groups are miscounted"
        assert set(self.asking) | set(self.passed_over) == {g.replica_id for g in asking}, "asking groups are misfiled"
        assert not set(self.asking) & set(self.passed_over), "a group asks twice"
        assert self.members_asking == sum(g.member for g in asking), "asking members are miscounted"
        shrinking = sum(g.request.shrink_only for g in asking if g.request is not None)
        assert self.shrinking == shrinking, "shrinking requests are miscounted"
        assert {s: g for g in groups if (s := g.session) is not None} == dict(self.by_session), "sessions are misfiled"
        assert {g.replica_id for g in groups if g.session is None} == set(self.suspects), "suspects are misfiled"
        assert all(g.request is None for g in self.suspects.values()), "a request outlived its session"
        heard = [g.heard_at for g in self.by_session.values()]
        assert heard == sorted(heard), "groups are not in the order in which they were heard"
        closed = [g.closed_at for g in self.suspects.values()]
        assert closed == sorted(closed), "suspects are not in the order in which their connections ended"
        asked = [g.asked_at for g in self.asking.values()]
        assert asked == sorted(asked), "groups are not in the order in which they asked"
        assert set(self.healing) == {g.replica_id for g in groups if g.healing is not None}, (
            "healing groups are misfiled"
        )
        assert all(g.request is None and g.kept_out is None for g in self.healing.values()), "a healing group asks"
        waited_for = Counter(g.failed_heals for g in self.healing.values() if not g.heal_given_up)
        assert self.heals_waited_for == waited_for, "heals are miscounted"
        named = {g.replica_id for namesakes in self.by_name.values() for g in namesakes}
        assert named == set(self.by_id), "names are misfiled"
        for name, namesakes in self.by_name.items():
            counted = [g.replica_id for g in namesakes if g.kept_out is not KeptOut.DUPLICATE_NAME]
            assert len(counted) == 1, f"{len(counted)} incarnations of {name} count"
        assert len(self._deadlines) <= 64 + 2 * len(self.by_id), "deadlines pile up"
