"""All groups that the lighthouse knows, indexed and counted so that no rule has to look at all of them.

A group *counts* (is healthy in the sense of the rules) from its hello until it leaves or is lost, unless it is
excluded: an older incarnation of its name is healthy, its layout or settings do not fit the job, or it stands by.

Every change of a group that is counted or indexed here goes through a method here; ``validate`` counts again.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from keepstep_lighthouse.quorum.events import Announce
from keepstep_lighthouse.quorum.groups.group import ANSWER, ASK, EXCLUDE, WITHDRAW, Answer, Excluded, Exclusion, Group
from keepstep_lighthouse.quorum.groups.open_heals import OpenHeals
from keepstep_lighthouse.quorum.groups.shard_sources import ShardSources
from keepstep_lighthouse.quorum.groups.tally import Tally
from keepstep_mesh.protocol.lineage import is_committed, is_live
from keepstep_mesh.protocol.messages import QuorumRequest
from keepstep_mesh.protocol.names import name_of

NEVER = float("inf")


class Groups:
    """All groups of one job that are healthy or may reconnect within the grace."""

    def __init__(self) -> None:
        self.by_id: dict[str, Group] = {}
        self.by_name: dict[str, list[Group]] = {}
        self.by_session: OrderedDict[int, Group] = OrderedDict()
        """In the order of their last frames."""
        self.suspects: dict[str, Group] = {}
        """In the order in which their connections ended."""
        self.asking: dict[str, Group] = {}
        """In the order in which they asked, since the last quorum was announced."""
        self.passed_over: dict[str, Group] = {}
        """Asking since before the last quorum, which was announced without them, or since before they counted. They do
        not start the join timeout."""
        self.heals = OpenHeals()
        self.standing_by: dict[str, Group] = {}
        self.sources = ShardSources()
        self.multiple = 1
        """``QuorumRequest.multiple`` of the group that asked last; it is equal in all groups of a job."""
        self.counted = 0
        self.asking_count = 0
        """Asking or passed over."""
        self.members_asking = 0
        self.shrinking = 0
        """Asking with shrink_only."""
        self.final = 0
        """Asking with final."""
        self.roots = 0
        """Asking with a root digest of their state."""
        self.live_steps: dict[int, int] = {}
        """Number of groups, by ``Group.live_step``; without 0."""
        self.tally = Tally()
        self._sizes: Counter[int] = Counter()
        """How many groups report each number of groups of the job, see ``set_size``."""
        self._waits_since: float | None = None
        """When the first group asked since the last quorum, also if that request is open no longer; None: none did."""
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
        """The group has a new connection; the previous one and its request are dropped."""
        self.disconnect(group, now)
        del self.suspects[group.replica_id]
        group.session = session
        self._count_live(group)
        group.highest_request = -1  # a client without incarnations may have restarted, with request numbers from 1
        group.heard_at = now
        self.by_session[session] = group

    def disconnect(self, group: Group, now: float) -> None:
        if group.session is None:
            return
        self.withdraw(group)
        del self.by_session[group.session]
        group.session = None
        self._count_live(group)
        group.closed_at = now
        self.suspects[group.replica_id] = group

    def heard(self, session: int, now: float) -> Group | None:
        """A frame of the session arrived; return its group, if it is still connected."""
        group = self.by_session.get(session)
        if group is not None:
            group.heard_at = now
            self.by_session.move_to_end(session)
        return group

    def remove(self, group: Group) -> None:
        """Remove the group; an incarnation that was excluded because of it counts from now on."""
        self.withdraw(group)
        self.heals.drop(group)
        self.set_size(group, 0)
        del self.by_id[group.replica_id]
        self.standing_by.pop(group.replica_id, None)
        self.suspects.pop(group.replica_id, None)
        if group.session is not None:
            del self.by_session[group.session]
            self._count_live(group, gone=True)
        self.counted -= group.excluded is None
        namesakes = self.by_name[group.name]
        namesakes.remove(group)
        if namesakes:
            self._settle_name(namesakes)
        else:
            del self.by_name[group.name]

    def matching(self, target: str) -> list[Group]:
        """Return the groups that the target of an order names: one incarnation, or all of a stable name."""
        one = self.by_id.get(target)
        return [one] if one is not None else list(self.by_name.get(target, ()))

    # ---- the number of groups

    @property
    def expected(self) -> int:
        """Number of groups of the job: the highest that a group here reports; 0: unknown."""
        return max(self._sizes, default=0)

    def set_size(self, group: Group, size: int) -> None:
        """Count the number of groups that the group reports; 0: it reports none, or does not fit the others."""
        if size != group.size:
            self._sizes[size] += size > 0
            self._sizes -= Counter((group.size,))  # without sizes that no group reports
            group.size = size

    # ---- states

    def set_state(self, group: Group, request: QuorumRequest) -> None:
        """Set step and lineage of a connected group to those of its request."""
        group.step, group.lineage = request.step, request.lineage
        self._count_live(group)

    def live_step(self, name: str) -> int:
        """Return the highest step of the connected groups with live weights, except ``name``; 0: none."""
        own = Counter(group.live_step for group in self.by_name.get(name, ()))
        return max((step for step, count in self.live_steps.items() if count > own[step]), default=0)

    def _count_live(self, group: Group, *, gone: bool = False) -> None:
        """The step of the group, its lineage, or its session changed."""
        before, now = group.live_step, 0 if gone or not _is_live(group) else group.step
        if before == now:
            return
        group.live_step, steps = now, self.live_steps
        if now:
            steps[now] = steps.get(now, 0) + 1
        if before:
            steps[before] -= 1
            if not steps[before]:
                del steps[before]

    # ---- exclusion

    def exclude(self, group: Group, excluded: Excluded) -> None:
        """The group does not count from now on; its heal is over."""
        if group.excluded is None or group.excluded.reason is not excluded.reason:
            self._uncount_request(group)
            self.heals.drop(group)
            group.apply(EXCLUDE)
            self.counted -= group.excluded is None
        group.excluded = excluded

    def readmit(self, group: Group) -> None:
        """The group counts again, and so does its open request; one that stands by does not."""
        if group.stands_by:
            self.exclude(group, Excluded(Exclusion.SPARE))
        elif group.excluded is not None:
            group.excluded = None
            self.counted += 1
            self._count_request(group, self.passed_over)

    def stand_by(self, group: Group) -> None:
        """Make a new group a spare. It does not count until it is let in."""
        group.stands_by = group.came_as_spare = True
        self.standing_by[group.replica_id] = group
        if group.excluded is None:
            self.exclude(group, Excluded(Exclusion.SPARE))

    def let_in(self, group: Group, now: float) -> None:
        """The spare, which asks, counts from now on, as if it had just asked."""
        group.stands_by, group.excluded, group.asked_at = False, None, now
        del self.standing_by[group.replica_id]
        self.counted += 1
        self._count_request(group, self.asking)

    def spares(self) -> list[str]:
        """Return the replica_ids of the groups that are kept out because they stand by."""
        return [one for one, group in self.standing_by.items() if group.is_excluded(Exclusion.SPARE)]

    def ready_spares(self) -> list[Group]:
        """Return the spares that ask, in the order of their arrival."""
        waiting = [one for one in self.standing_by.values() if one.is_excluded(Exclusion.SPARE)]
        ready = [one for one in waiting if one.request is not None and one.draining is None]
        return sorted(ready, key=attrgetter("arrived"))

    def _settle_name(self, namesakes: list[Group]) -> None:
        oldest = min(namesakes, key=lambda group: (not group.member, group.arrived))
        for group in namesakes:
            if group is not oldest:
                self.exclude(group, Excluded(Exclusion.DUPLICATE_NAME))
            elif group.is_excluded(Exclusion.DUPLICATE_NAME):
                self.readmit(group)

    def namesake(self, group: Group) -> Group:
        """Return the incarnation of this name that is not excluded as a duplicate."""
        return next(other for other in self.by_name[group.name] if not other.is_excluded(Exclusion.DUPLICATE_NAME))

    # ---- requests

    def open(self, group: Group, request: QuorumRequest, now: float) -> None:
        """The group asks, with its highest request so far. Withdraw an open request; end its heal."""
        if group.request is not None:
            self.withdraw(group)
        if group.diverged and (group.step, group.lineage) != (request.step, request.lineage):
            group.diverged = False
        if group.heal is not None:
            self.heals.end(group, request)
        group.apply(ASK)
        group.request = request
        group.asked_at = now
        group.heal_given_up = group.told_closed = False
        if self._waits_since is None and group.excluded is None:
            self._waits_since = now
        if group.working_since is not None:
            self._count_step(group, request, now - group.working_since)
        self.set_state(group, request)
        group.trained = group.trained or is_committed(request.lineage)
        self.multiple = request.multiple
        group.highest_request = request.request
        self._count_request(group, self.asking)
        heapq.heappush(self._deadlines, (now + request.timeout_ms / 1000, group.replica_id, request.request))
        if len(self._deadlines) > 64 + 2 * len(self.by_id):
            self._drop_stale_deadlines()

    def _count_step(self, group: Group, request: QuorumRequest, seconds: float) -> None:
        """``request`` ends the step that began with the last answer, ``seconds`` ago."""
        group.step_seconds, group.working_since = seconds, None
        # a group that asks for the step of its answer again, without a failure, waited for heals before that step; one
        # that asks at its old state again withdrew its request, or did not heal where others finished
        answer, tally = group.answer, self.tally
        same_step = answer is not None and request.step == answer.announce.step
        same_state = request.step == group.step and request.lineage == group.lineage
        failed = False
        if request.commit_failures:
            failed = not request.retry and not _failed_later(group, request)
            tally.discarded += failed
            tally.retried += request.retry
        committed = not (failed or same_step or same_state)
        if committed:
            group.committed += 1
            group.committed_at = group.asked_at
            tally.committed += 1
        if committed or failed:
            tally.steps.add(seconds)

    def withdraw(self, group: Group) -> None:
        """The group no longer asks. No effect on a group that does not ask."""
        if group.request is not None:
            self._uncount_request(group)
            group.apply(WITHDRAW)
            group.request = None

    def _count_request(self, group: Group, where: dict[str, Group]) -> None:
        if group.excluded is None and group.request is not None:
            where[group.replica_id] = group
            self.asking_count += 1
            self.members_asking += group.member
            self.shrinking += group.request.shrink_only
            self.final += group.request.final
            self.roots += group.request.root is not None

    def _uncount_request(self, group: Group) -> None:
        if group.excluded is None and group.request is not None:
            if self.asking.pop(group.replica_id, None) is None:
                del self.passed_over[group.replica_id]
            self.asking_count -= 1
            self.members_asking -= group.member
            self.shrinking -= group.request.shrink_only
            self.final -= group.request.final
            self.roots -= group.request.root is not None

    def all_asking(self) -> list[Group]:
        """Return the groups that ask, sorted by replica_id."""
        return sorted([*self.asking.values(), *self.passed_over.values()], key=attrgetter("replica_id"))

    def first_asked(self) -> float | None:
        """Return when the first group asked since the last quorum; None: no group has."""
        for group in self.asking.values():
            return max(group.asked_at, self._clock_start)
        return None

    def waited(self, now: float) -> float:
        """Return for how long groups have waited for the next quorum, in seconds, also if requests timed out and were
        made again; 0: no group has asked.
        """
        return 0.0 if self._waits_since is None else now - max(self._waits_since, self._clock_start)

    def clock_starts(self, now: float) -> None:
        """Measure the join timeout from ``now``, for requests made earlier too: no quorum could form until now."""
        self._clock_start = now

    def close_round(self, announce: Announce, chosen: list[Group], now: float) -> None:
        """Answer ``chosen``. The other requests stay open."""
        for group in chosen:
            group.apply(ANSWER)
            if group.request is not None:
                self.tally.waits.add(now - group.asked_at)
                group.answer = Answer(announce, group.request.request, group.session)
            group.request = None
            group.working_since = now
        left: list[Group] = []
        if len(chosen) < self.asking_count:
            asked = (*self.passed_over.values(), *self.asking.values())
            left = [group for group in asked if group.request is not None]
        self._waits_since = None
        self.asking = {}
        self.passed_over = {group.replica_id: group for group in left}
        self.asking_count = len(left)
        self.members_asking = sum(group.member for group in left)
        self.shrinking = sum(group.request.shrink_only for group in left if group.request is not None)
        self.final = sum(group.request.final for group in left if group.request is not None)
        self.roots = sum(group.request.root is not None for group in left if group.request is not None)
        self._drop_stale_deadlines()

    def set_members(self, before: tuple[str, ...], members: list[Group]) -> None:
        """Make ``members`` the members instead of ``before``."""
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
        """Return groups whose request is past its deadline, earliest first. The caller withdraws them."""
        due: dict[str, Group] = {}
        while self.next_request_deadline() <= now:
            _, replica_id, _ = heapq.heappop(self._deadlines)
            due[replica_id] = self.by_id[replica_id]
        return list(due.values())

    def _is_open(self, replica_id: str, number: int) -> bool:
        group = self.by_id.get(replica_id)
        return group is not None and group.request is not None and group.request.request == number

    def _drop_stale_deadlines(self) -> None:
        if not self.asking_count and self.counted == len(self.by_id):  # no group asks, and none is excluded
            self._deadlines.clear()
            return
        self._deadlines = [entry for entry in self._deadlines if self._is_open(entry[1], entry[2])]
        heapq.heapify(self._deadlines)

    # ---- invariants

    def validate(self) -> None:
        """Raise AssertionError with a sentence when a count or an index does not fit the groups."""
        groups = list(self)
        for group in groups:
            group.validate()
        asking = [g for g in groups if g.request is not None and g.excluded is None]
        assert self.counted == sum(g.excluded is None for g in groups), "counted groups are miscounted"
        assert {g.replica_id for g in groups if g.stands_by} == set(self.standing_by), "spares are misfiled"
        assert not any(g.stands_by and g.excluded is None for g in groups), "a spare counts"
        assert set(self.asking) | set(self.passed_over) == {g.replica_id for g in asking}, "asking groups are misfiled"
        assert not set(self.asking) & set(self.passed_over), "a group asks twice"
        assert self.asking_count == len(asking), "asking groups are miscounted"
        assert self.members_asking == sum(g.member for g in asking), "asking members are miscounted"
        shrinking = sum(g.request.shrink_only for g in asking if g.request is not None)
        assert self.shrinking == shrinking, "shrinking requests are miscounted"
        final = sum(g.request.final for g in asking if g.request is not None)
        assert self.final == final, "final requests are miscounted"
        roots = sum(g.request.root is not None for g in asking if g.request is not None)
        assert self.roots == roots, "requests with a root digest are miscounted"
        assert self._sizes == Counter(g.size for g in groups if g.size), "numbers of groups are miscounted"
        live = Counter(g.step for g in groups if g.step and _is_live(g))
        assert self.live_steps == live, "steps with live weights are miscounted"
        assert {s: g for g in groups if (s := g.session) is not None} == dict(self.by_session), "sessions are misfiled"
        assert {g.replica_id for g in groups if g.session is None} == set(self.suspects), "suspects are misfiled"
        heard = [g.heard_at for g in self.by_session.values()]
        assert heard == sorted(heard), "groups are not in the order in which they were heard"
        closed = [g.closed_at for g in self.suspects.values()]
        assert closed == sorted(closed), "suspects are not in the order in which their connections ended"
        asked = [g.asked_at for g in self.asking.values()]
        assert asked == sorted(asked), "groups are not in the order in which they asked"
        self.heals.validate(groups)
        named = {g.replica_id for namesakes in self.by_name.values() for g in namesakes}
        assert named == set(self.by_id), "names are misfiled"
        for name, namesakes in self.by_name.items():
            counted = [g.replica_id for g in namesakes if not g.is_excluded(Exclusion.DUPLICATE_NAME)]
            assert len(counted) == 1, f"{len(counted)} incarnations of {name} count"
        assert len(self._deadlines) <= 64 + 2 * len(self.by_id), "deadlines pile up"


def _failed_later(group: Group, request: QuorumRequest) -> bool:
    """Return whether what failed is a collective after the step of the last answer, which the group committed."""
    report = request.last_step
    if group.answer is None or report is None or not report.committed:
        return False
    answer = group.answer.announce
    return (report.quorum_id, report.step) == (answer.quorum_id, answer.step)


def _is_live(group: Group) -> bool:
    """Return whether another group could heal from this one now."""
    if group.session is None:
        return False
    return type(group.lineage) is int or is_live(group.step, group.lineage)  # an int nearly always
