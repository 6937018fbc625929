"""Plans of large quorums: made in linear time, and in constant time while the member list stays."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep_mesh.protocol.membership import Lineage, Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum

INFO = MemberInfo("http://host:1", "http://host:1")
NAMES = tuple("abcdefgh")


def member(name: str, step: int, lineage: Lineage, commit_failures: int = 0) -> Member:
    return Member(name, step, lineage, commit_failures, shrink_only=False, info=INFO)


def quorum(listed: tuple[Member, ...], *, uniform: bool = False, step: int = 0, lineage: Lineage = "") -> Quorum:
    return Quorum(0, 1, 7, 0, 0, step, lineage, 0, uniform, listed)


states = st.tuples(
    st.integers(0, 2),
    st.one_of(st.integers(1, 2), st.sampled_from(["", "x", "diverged:z", "torn:z"])),
    st.integers(0, 2),
)
lists = st.lists(states, min_size=1, max_size=len(NAMES)).map(
    lambda drawn: tuple(member(name, *state) for name, state in zip(NAMES, drawn, strict=False))
)


@st.composite
def rounds(draw: st.DrawFn) -> list[Quorum]:
    """Quorums as a session returns them: now and then a new list, then answers that refer to it."""
    found: list[Quorum] = []
    for number in range(draw(st.integers(1, 6))):
        fresh = not found or draw(st.booleans())
        listed = draw(lists) if fresh else found[-1].listed
        changes = {"uniform": not fresh or draw(st.booleans()), "step": number, "lineage": number}
        joiners, verify = draw(st.integers(0, 2)), draw(st.booleans())
        found.append(replace(quorum(listed, **changes), epoch=1 + number // 2, joiners=joiners, verify=verify))
    return found


@given(rounds())
def test_a_plan_made_from_the_last_one_equals_one_made_from_scratch(quorums: list[Quorum]) -> None:
    previous: dict[str, QuorumPlan] = {}
    for one in quorums:
        for listed in one.listed:
            name = listed.replica_id
            plan = make_plan(one, name, previous.get(name))
            assert plan == make_plan(one, name)
            previous[name] = plan


@given(lists, st.booleans())
def test_a_plan_keeps_only_values_that_follow_from_its_cohort(listed: tuple[Member, ...], uniform: bool) -> None:
    for rank, one in enumerate(listed):
        plan = make_plan(quorum(listed, uniform=uniform), one.replica_id)
        assert plan.replica_rank == rank
        assert plan.max_replica_rank == (plan.cohort.index(rank) if rank in plan.cohort else None)
        assert plan.healing == tuple(other for other in range(len(listed)) if other not in plan.cohort)


@pytest.mark.parametrize("uniform", [True, False])
def test_a_plan_of_20000_groups_takes_linear_time(uniform: bool) -> None:
    listed = tuple(member(f"g{number:05}", number % 2, 1) for number in range(20_000))
    agreed = quorum(listed, uniform=uniform)
    began = time.thread_time()
    plan = make_plan(agreed, "g00000" if uniform else "g00001")
    for _ in range(100):
        assert plan.max_replica_rank == 0
        assert len(plan.healing) == (0 if uniform else 10_000)
    assert time.thread_time() - began < 1.0, "a quadratic plan takes several seconds, a linear one 0.03 s"
