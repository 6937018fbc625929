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
from tests.support.models.one_copy_moments import Group, Job, check_copies, start
from tests.support.models.plan_checks import check_plan
from tests.support.models.symbolic_copies import Rank

ANY = tuple(one / 12 for one in range(13))
"""Any number of messages may have arrived."""
SOME = (0.0, 0.6)
NONE = (0.0,)
Away = tuple[Rank, ...]


@dataclass
class Explorer:
    """Loses members at all moments, again and again."""

    job: Job
    details: Sequence[Sequence[float]]
    """For each loss in turn, how many messages may have arrived, when it is in a step."""

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
        check_plan(ordered, recovery, self.job.copies, may_lose=back or len(away) > self.job.copies)
        if recovery.kind is Kind.LOST or depth + 1 >= len(self.details):
            return
        for moment in self.job.moments_of_recovery(ordered, recovery):
            self._lose(moment, away, quorum_id, depth + 1, back=back)
        self.step(self.job.after_recovery(ordered, recovery), away, depth + 1, back=back)


@pytest.mark.parametrize(
    ("copies", "details", "steps", "plans"),
    [(1, ANY, 0, 497), (1, ANY, 3, 497), (2, SOME, 3, 13_091)],
    ids=["in the first step", "in a later step", "two of three, with two copies"],
)
def test_members_lost_between_any_two_messages_lose_no_step(
    copies: int, details: Sequence[float], steps: int, plans: int
) -> None:
    job = Job(copies, slices=2)
    explorer = Explorer(job, [details])
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
