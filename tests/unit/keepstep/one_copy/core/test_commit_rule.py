"""Check the rule of commit in all moments at which members may be lost: between any two messages.

Members of one rank each send copies in two slices, vote, and commit. In any moment of a step, and of the recovery after
it, one may die or freeze, a spare may take its place or not, and a frozen one may come back. The plan of the recovery
must bring all shards to one state of one history, behind no member that is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from keepstep.one_copy.core.recovery_plan import Kind
from keepstep.one_copy.core.world import keepers
from tests.support.models.one_copy_moments import Group, Job, check_copies, start
from tests.support.models.plan_checks import check_plan
from tests.support.models.symbolic_copies import Rank

ANY = tuple(one / 12 for one in range(13))
"""Any number of messages may have arrived."""
NONE = (0.0,)
Away = tuple[Rank, ...]


@dataclass
class Explorer:
    """Loses members at all moments, again and again."""

    job: Job
    details: Sequence[Sequence[float]]
    """For each loss in turn, how many messages may have arrived, when it is in a step."""
    left: int = 0
    """Number of members that have left, and whose shards are not known to be at keepers again."""

    def __post_init__(self) -> None:
        self.plans = 0
        self.kinds: set[Kind] = set()
        self._seen: set[tuple[object, ...]] = set()

    def step(self, group: Group, away: Away = (), depth: int = 0, *, back: bool = False) -> None:
        """Lose members in each moment of a step, of this attempt and of those after it.

        Args:
            group: before the step.
            away: members that were lost. Each is dead, or frozen and may come back as it was.
            depth: number of losses before.
            back: whether one has returned.
        """
        for ranks, newest in self.job.moments_of_step(group, self.details[depth]):
            check_copies(self.job, group, ranks, newest)
            self._lose(ranks, away, group.world.formed, depth, back=back)

    def recovery(self, ranks: Sequence[Rank], quorum_id: int) -> Group:
        """Lose members in each moment of a recovery. Return those that are there after it, if none is lost."""
        recovery = self.job.plan(quorum_id, ranks)
        for moment in self.job.moments_of_recovery(ranks, recovery):
            self._lose(moment, (), quorum_id, 0, back=False)
        return self.job.after_recovery(ranks, recovery)

    def _lose(self, ranks: Sequence[Rank], away: Away, quorum_id: int, depth: int, *, back: bool) -> None:
        most = self.job.copies if depth == 0 else 1
        for number in range(min(most, len(ranks) - 1) + 1):
            for gone in itertools.combinations(range(len(ranks)), number):
                left = [one for index, one in enumerate(ranks) if index not in gone]
                lost = tuple(ranks[index] for index in gone)
                for returned in [(), *((one,) for one in away)]:
                    rest = (*(one for one in away if one not in returned), *lost)
                    spares = [Rank(f"s{depth}{one}") for one in range(number - len(returned))]
                    for members in ([*left, *returned], [*left, *returned, *spares]):
                        self._meet(members, rest, quorum_id + 1, depth, back=back or bool(returned))

    def _meet(self, ranks: list[Rank], away: Away, quorum_id: int, depth: int, *, back: bool) -> None:
        ordered = sorted(ranks, key=lambda one: one.name)
        key = tuple(one.holding() for one in ordered), tuple(one.holding() for one in away), depth, back
        if key in self._seen:
            return
        self._seen.add(key)
        self.plans += 1
        recovery = self.job.plan(quorum_id, ordered)
        self.kinds.add(recovery.kind)
        check_plan(ordered, recovery, self.job.copies, may_lose=back or len(away) + self.left > self.job.copies)
        if recovery.kind is Kind.LOST or depth + 1 >= len(self.details):
            return
        for moment in self.job.moments_of_recovery(ordered, recovery):
            self._lose(moment, away, quorum_id, depth + 1, back=back)
        self.step(self.job.after_recovery(ordered, recovery), away, depth + 1, back=back)


@pytest.mark.parametrize(
    ("copies", "slices", "steps", "plans"),
    [(1, 2, 0, 497), (1, 2, 3, 497), (2, 1, 3, 13_091)],
    ids=["in the first step", "in a later step", "two of three, with two copies"],
)
def test_members_lost_between_any_two_messages_lose_no_step(copies: int, slices: int, steps: int, plans: int) -> None:
    job = Job(copies, slices)
    explorer = Explorer(job, [ANY])
    explorer.step(start(job, ["a", "b", "c"], steps))
    assert explorer.kinds == ({Kind.FRESH, Kind.REPLACED, Kind.RESIZED} if not steps else {Kind.REPLACED, Kind.RESIZED})
    assert explorer.plans == plans


def test_members_lost_in_a_recovery_and_in_the_step_after_it() -> None:
    job = Job(copies=1, slices=2)
    explorer = Explorer(job, [NONE, NONE])
    explorer.step(start(job, ["a", "b", "c"], 2))
    assert explorer.kinds == {Kind.REPLACED, Kind.RESIZED, Kind.LOST}
    assert explorer.plans == 26_267


def test_members_lost_after_an_attempt_that_all_have_dropped_in_the_same_quorum() -> None:
    job = Job(copies=1, slices=2)
    explorer = Explorer(job, [ANY])
    explorer.step(job.after_step(start(job, ["a", "b", "c"], 2), committed=False))
    assert explorer.kinds == {Kind.REPLACED, Kind.RESIZED}
    assert explorer.plans == 105


@pytest.mark.parametrize("first", "abc")
def test_members_lost_while_others_leave_one_after_the_other(first: str) -> None:
    """A member leaves after a commit, and the next one after a commit in the world without it."""
    job = Job(copies=1, slices=2)
    explorer = Explorer(job, [ANY])
    group = start(job, ["a", "b", "c"], 2)
    for leaving in (first, "c" if first == "b" else "b"):
        explorer.left = 1
        group = explorer.recovery([one for one in group.ranks if one.name != leaving], group.world.formed + 1)
        explorer.left = 0  # the others have waited for copies of the shards that were cut again
        explorer.step(group)
        group = job.after_step(group)
    assert group.world.size == 1
    assert explorer.plans == 120


def test_members_lost_when_a_spare_changes_the_keeper_of_another_member() -> None:
    """It is in the failure domain of ``a``, so the keeper of ``a`` is ``c`` in place of the member that is gone."""
    job = Job(copies=1, slices=2)
    explorer = Explorer(job, [ANY], left=1)
    group = start(job, ["a", "b", "c"], 2)
    a, b, c = group.ranks
    assert keepers(group.world, 0, 1) == (1,)
    group = explorer.recovery([a, c, Rank("s", domain=a.holding().domain)], group.world.formed + 1)
    assert [seat.replica_id for seat in group.world.seats] == ["a", "s", "c"]
    assert keepers(group.world, 0, 1) == (2,)
    explorer.step(group, away=(b,))
    explorer.left = 0
    explorer.step(job.after_step(group))
    assert explorer.kinds == {Kind.REPLACED, Kind.RESIZED, Kind.LOST}
