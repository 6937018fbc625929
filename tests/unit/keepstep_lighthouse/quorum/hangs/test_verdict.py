"""Which ranks hold up a job in which all wait."""

from __future__ import annotations

from typing import Any

from keepstep_lighthouse.quorum.hangs.verdict import GROUPS, RANKS, Standing, judge
from keepstep_mesh.protocol.stack_messages import RankStacks


def waiting(group: str, rank: int, collectives: int, within: int = 0, **of_stacks: Any) -> Standing:
    stacks = {"step": 7, "waits": GROUPS, "in_flight": "all-reduce", "line": f"train.py:{rank}", **of_stacks}
    found = RankStacks(1, rank, collectives=collectives, group_collectives=within, **stacks)
    return Standing(group, 100.0, 100.0, found, answers=9, same_for=100.0, total=9, learned=True, round=(1, 7))


def suspects(*standings: Standing) -> list[str]:
    return [one.who for one in judge(standings, others=1, limit=30.0).suspects]


def test_stages_of_a_pipeline_that_reduce_fewer_units_are_not_behind() -> None:
    stages = [waiting(group, rank, collectives) for group in "ab" for rank, collectives in enumerate((5, 2))]
    assert suspects(*stages) == []
    assert suspects(waiting("c", 1, 1), *stages) == ["c rank 1"]
    assert suspects(waiting("c", 0, 3), waiting("c", 1, 2), *stages) == ["c rank 0"]


def test_a_group_that_was_started_again_is_not_behind_with_its_collectives_within() -> None:
    old, new = ([waiting(group, rank, 2, within) for rank in (0, 1)] for group, within in (("a", 90), ("b", 4)))
    assert suspects(*old, *new) == []
    assert suspects(*old, new[0], waiting("b", 1, 2, within=3, waits=RANKS)) == ["b rank 1"]


def test_a_rank_of_the_only_group_that_waits_is_behind_the_other_ranks() -> None:
    assert suspects(waiting("a", 0, 3), waiting("a", 1, 2)) == ["a rank 1"]
