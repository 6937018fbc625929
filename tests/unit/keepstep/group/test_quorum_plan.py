"""Sources and joiners of heals, and participants: one quorum gives all members plans that fit together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.group.quorum_plan import WorldSizeMode, make_plan
from keepstep_mesh.protocol.lineage import origin, soundness
from keepstep_mesh.protocol.membership import Lineage, Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum


def member(name: str, step: int, lineage: Lineage, commit_failures: int = 0) -> Member:
    return Member(
        name, step, lineage, commit_failures, shrink_only=False, info=MemberInfo(f"http://{name}:1", f"http://{name}:1")
    )


def quorum(*members: Member, uniform: bool = False, step: int = 0, lineage: Lineage = "") -> Quorum:
    return Quorum(0, 1, 7, 0, 0, step, lineage, 0, uniform, tuple(sorted(members, key=lambda m: m.replica_id)))


def test_equal_groups_all_take_part_and_nobody_heals():
    agreed = quorum(member("a", 5, 3), member("b", 5, 3))
    plans = [make_plan(agreed, name) for name in "ab"]
    assert [plan.max_replica_rank for plan in plans] == [0, 1]
    assert [(plan.heal, plan.destinations, plan.max_world_size) for plan in plans] == [(False, (), 2)] * 2


def test_a_group_behind_heals_and_has_no_place_in_the_cohort():
    agreed = quorum(member("a", 5, 3), member("b", 2, 1), member("c", 5, 3))
    behind = make_plan(agreed, "b")
    assert (behind.heal, behind.source, behind.max_replica_rank) == (True, 0, None)
    assert (behind.replica_rank, behind.replica_world_size, behind.max_world_size) == (1, 3, 2)
    assert make_plan(agreed, "a").destinations == (1,)
    assert make_plan(agreed, "c").max_replica_rank == 1


@pytest.mark.parametrize(
    ("behind", "heals"),
    [
        (member("b", 2, 1), False),
        (member("b", 2, "synchronized:1"), False),
        (member("b", 0, "new:a"), False),  # it trains from the weights that the job began with
        (member("b", 0, "new:b"), True),
        (member("b", 0, ""), True),
        (member("b", 2, "loaded:1"), True),
        (member("b", 2, "torn:b"), True),
        (member("b", 2, "diverged:b"), True),
        (member("b", 5, 2), True),  # of equal length, so it has steps that the others do not have
    ],
    ids=lambda one: repr(one.lineage) if isinstance(one, Member) else "",
)
def test_only_a_group_that_trained_an_earlier_state_of_the_job_is_late_instead_of_healing(behind, heals) -> None:
    agreed = quorum(member("a", 5, 3), behind, member("c", 5, 3))
    plans = [make_plan(agreed, name, brings_late=True) for name in "abc"]
    assert [plan.behind for plan in plans] == [False, True, False]
    assert plans[1].heal == heals
    assert all(plan.late == (() if heals else (1,)) for plan in plans)
    assert all(plan.healing == ((1,) if heals else ()) for plan in plans)
    assert make_plan(agreed, "b").heal, "without brings_late every group that is behind heals"


def test_a_group_from_before_a_resume_does_not_catch_up():
    agreed = quorum(member("a", 5, "resumed:4:6"), member("b", 2, 1))
    assert make_plan(agreed, "b", brings_late=True).heal


def test_a_group_that_follows_neither_heals_nor_counts_nor_is_a_source():
    agreed = quorum(member("a", 5, 3), member("b", 5, "follows:3"), member("c", 5, 3), member("d", 4, 3))
    a, b, c, d = (make_plan(agreed, name) for name in "abcd")
    assert (b.follows, b.behind, b.heal, b.max_world_size) == (True, True, False, 2)
    assert [plan.participation(WorldSizeMode.DYNAMIC, 1, healed_before=False)[0] for plan in (a, b, c)] == [0, None, 1]
    assert (d.source, a.destinations, c.destinations) == (0, (3,), ())
    assert {plan.followers for plan in (a, b, c, d)} == {(1,)}


@pytest.mark.parametrize(
    "behind", [member("b", 4, "follows:3"), member("b", 6, "follows:3"), member("b", 5, "follows:2")]
)
def test_a_group_that_followed_other_steps_than_the_others_took_heals(behind):
    agreed = quorum(member("a", 5, 3), behind)
    assert (make_plan(agreed, "b").heal, make_plan(agreed, "a").destinations) == (True, (1,))


def test_a_group_that_follows_heals_where_groups_finish_and_any_state_is_worth_more_than_none():
    finishing = replace(quorum(member("a", 5, 3), member("b", 5, "follows:3")), finishing=True)
    assert make_plan(finishing, "b").heal
    left = quorum(member("a", 0, "torn:a"), member("b", 9, "follows:3"))
    assert make_plan(left, "a").lineage == "torn:a"


def test_groups_at_an_equal_step_with_different_lineages_do_not_go_on_side_by_side():
    agreed = quorum(member("a", 5, 3), member("b", 5, 4))
    assert make_plan(agreed, "a").source == 1
    assert make_plan(agreed, "b").destinations == (0,)


def test_at_the_first_step_all_heal_from_the_lowest_id():
    agreed = quorum(member("a", 0, "a:1"), member("b", 0, "b:1"), member("c", 0, "c:1"))
    assert [make_plan(agreed, name).source for name in "abc"] == [None, 0, 0]


def test_at_the_first_step_the_state_that_most_hold_wins():
    agreed = quorum(member("a", 0, "a:2"), member("b", 0, "old"), member("c", 0, "old"))
    assert [make_plan(agreed, name).source for name in "abc"] == [1, None, None]


def test_without_init_sync_nobody_heals_at_the_first_step():
    agreed = quorum(member("a", 0, ""), member("b", 0, ""))
    assert not make_plan(agreed, "a").heal
    assert not make_plan(agreed, "b").heal


def test_joiners_are_spread_over_the_sources():
    agreed = quorum(member("a", 9, 3), member("b", 9, 3), *(member(name, 0, name) for name in "cdef"))
    assert make_plan(agreed, "a").destinations == (2, 4)
    assert make_plan(agreed, "b").destinations == (3, 5)


def test_a_heal_that_failed_is_tried_from_another_source():
    first = quorum(member("a", 9, 3), member("b", 9, 3), member("c", 0, "c"))
    again = quorum(member("a", 9, 3), member("b", 9, 3), member("c", 0, "c", commit_failures=1))
    assert (make_plan(first, "c").source, make_plan(again, "c").source) == (0, 1)
    assert make_plan(again, "b").destinations == (2,)


def test_a_torn_state_is_never_the_reference():
    agreed = quorum(member("a", 0, "torn:a"), member("b", 0, "b:1"))
    assert make_plan(agreed, "a").source == 1


def test_a_uniform_quorum_is_taken_at_its_word_whatever_the_old_list_says():
    agreed = quorum(member("a", 3, 1), member("b", 0, "b"), uniform=True, step=12, lineage=6)
    plan = make_plan(agreed, "b")
    assert (plan.max_step, plan.lineage, plan.heal, plan.max_replica_rank) == (12, 6, False, 1)


def test_a_plan_made_from_the_last_one_is_as_one_made_from_scratch():
    listed = (member("a", 5, 3), member("b", 5, 3))
    first = quorum(*listed)
    later = Quorum(0, 2, 7, 0, 0, 9, 7, 1, uniform=True, listed=first.listed)
    assert make_plan(later, "b", make_plan(first, "b")) == make_plan(later, "b")
    healing = quorum(member("a", 5, 3), member("b", 2, 3))
    later = Quorum(0, 2, 7, 0, 0, 9, 7, 1, uniform=True, listed=healing.listed)
    assert make_plan(later, "b", make_plan(healing, "b")) == make_plan(later, "b")


def test_a_group_that_asked_as_torn_is_torn_for_each_of_its_ranks_whatever_the_rank_itself_holds():
    beside_a_sound_one = quorum(member("a", 5, 3), member("b", 0, "torn:b"))
    assert [make_plan(beside_a_sound_one, name).torn for name in "ab"] == [False, True]
    alone = quorum(member("b", 0, "torn:b"))
    assert make_plan(alone, "b").torn


def test_a_diverged_group_heals_at_its_own_step_and_at_a_later_one():
    agreed = quorum(member("a", 5, 3), member("b", 5, "diverged:b"), member("c", 6, "diverged:c"), member("d", 5, 3))
    plans = {one: make_plan(agreed, one) for one in "abcd"}
    assert {(plan.max_step, plan.lineage, plan.cohort) for plan in plans.values()} == {(5, 3, (0, 3))}
    assert [(one, plan.source) for one, plan in plans.items() if plan.diverged] == [("b", 0), ("c", 3)]
    assert [one for one, plan in plans.items() if plan.heal] == ["b", "c"]


def test_where_there_is_no_sound_state_the_furthest_diverged_one_is_gone_on_from():
    members = member("a", 5, "diverged:a"), member("b", 0, "torn:b"), member("c", 4, "diverged:c")
    plan = make_plan(quorum(*members), "a")
    assert (plan.max_step, plan.lineage, plan.heal, plan.diverged) == (5, "diverged:a", False, False)


def test_whether_states_are_compared_is_of_this_round():
    first = quorum(member("a", 5, 3), member("b", 5, 3))
    later = Quorum(0, 2, 7, 0, 0, 9, 7, 1, uniform=True, listed=first.listed, verify=True)
    plan = make_plan(later, "a", make_plan(first, "a"))
    assert plan.verify
    assert not make_plan(first, "a", plan).verify


def test_a_group_outside_the_quorum_gets_no_plan():
    with pytest.raises(ValueError, match="quorum 7 has no member x; its members are a"):
        make_plan(quorum(member("a", 0, "")), "x")


names = ["", "x", "y", "behind:z:1", "diverged:z", "torn:z", "loaded:2", "resumed:2:2", "resumed:3:synchronized:3"]
lineages = st.one_of(st.integers(1, 3), st.sampled_from(names))
states = st.tuples(st.integers(0, 3), lineages)


@given(st.lists(st.tuples(states, st.integers(0, 2)), min_size=1, max_size=8))
def test_the_plans_of_all_members_fit_together(drawn):
    members = [member(f"g{i}", *state, commit_failures=failures) for i, (state, failures) in enumerate(drawn)]
    agreed = quorum(*members)
    plans = [make_plan(agreed, m.replica_id) for m in agreed.listed]
    assert len({(p.max_step, p.lineage, p.cohort, p.max_world_size) for p in plans}) == 1
    best = max((soundness(m.step, m.lineage), origin(m.lineage).resumed) for m in members)
    assert plans[0].max_step == max(
        m.step for m in members if (soundness(m.step, m.lineage), origin(m.lineage).resumed) == best
    )
    for plan in plans:
        assert plan.heal == (plan.max_replica_rank is None)
        if plan.source is not None:
            assert plan.source in plan.cohort
            assert plan.replica_rank in plans[plan.source].destinations
        for destination in plan.destinations:
            assert plans[destination].source == plan.replica_rank
    held = {(m.step, m.lineage) for m in agreed.listed if make_plan(agreed, m.replica_id).max_replica_rank is not None}
    assert len(held) == 1
