from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.one_copy.core.holding import Copy, Holding, Shard, State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Way, plan_recovery
from keepstep.one_copy.core.world import Seat, World

WORLD = World(1, 1, tuple(Seat(name, f"host {name}") for name in "abc"), 1)
OLD, NOW, NEXT = State(3, 1), State(4, 1), State(5, 1)


def member(
    name: str, state: State | None = NOW, *, voted: bool = False, keeps: tuple[State, ...] = (OLD, NOW)
) -> Holding:
    """A member of WORLD: it keeps the copy of the seat before its own."""
    if state is None:
        return Holding(name, 0, f"host {name}", "")
    rank = "abc".index(name)
    copy = Copy(1, (rank - 1) % 3, keeps, keeps[0] if keeps else None)
    return Holding(name, 0, f"host {name}", "", (Shard(WORLD, rank, state, 1 if voted else 0),), (copy,))


def newcomer(name: str) -> Holding:
    return member(name, None)


def planned(*holdings: Holding, copies: int = 1) -> Recovery:
    return plan_recovery(7, sorted(holdings, key=lambda one: one.replica_id), copies=copies)


def ways(recovery: Recovery) -> list[tuple[int, Way]]:
    return [(one.holder, one.way) for one in recovery.sources]


def test_a_spare_takes_the_empty_seat_and_reads_the_shard_from_its_keeper() -> None:
    found = planned(member("a"), member("c"), newcomer("s"))
    assert found.kind is Kind.REPLACED
    assert [seat.replica_id for seat in found.world.seats] == ["a", "s", "c"]
    assert (found.world.number, found.world.formed) == (1, 7)
    assert ways(found) == [(0, Way.LIVE), (1, Way.COPY), (1, Way.LIVE)]
    assert found.building == (1,)
    assert found.fills == ((0, 1),), "the spare keeps nothing yet; the keeper of the lost rank goes on with its copy"


def test_a_member_that_is_back_under_its_name_has_its_seat_again() -> None:
    found = planned(member("a"), newcomer("b"), member("c"))
    assert [seat.replica_id for seat in found.world.seats] == ["a", "b", "c"]
    assert found.building == (1,)


def test_without_a_spare_all_shards_are_cut_again() -> None:
    found = planned(member("a"), member("c"))
    assert found.kind is Kind.RESIZED
    assert [seat.replica_id for seat in found.world.seats] == ["a", "c"]
    assert (found.world.number, found.previous) == (7, WORLD)
    assert ways(found) == [(0, Way.LIVE), (1, Way.COPY), (1, Way.LIVE)]
    assert found.building == (0, 1)
    assert found.fills == ((0, 1), (1, 0))


def test_a_further_member_comes_after_those_that_are_there() -> None:
    found = planned(member("a"), member("b"), member("c"), newcomer("0"))
    assert found.kind is Kind.RESIZED
    assert [seat.replica_id for seat in found.world.seats] == ["a", "b", "c", "0"]


def test_a_step_that_a_living_member_has_committed_is_taken_by_those_that_voted() -> None:
    keeps = (NOW, NEXT)
    found = planned(member("a", NEXT, keeps=keeps), member("b", voted=True, keeps=keeps), newcomer("c"))
    assert found.target == NEXT
    assert ways(found) == [(0, Way.LIVE), (1, Way.FORWARD), (0, Way.COPY)]


def test_a_step_that_only_the_dead_member_committed_is_dropped() -> None:
    found = planned(
        member("a", voted=True, keeps=(NOW, NEXT)), newcomer("b"), member("c", voted=True, keeps=(NOW, NEXT))
    )
    assert found.target == NOW
    assert {way for _, way in ways(found)} == {Way.LIVE, Way.COPY}


def test_a_base_at_a_keeper_shows_that_the_dead_member_committed_its_step() -> None:
    """The base of a step is sent after it was committed."""
    found = planned(member("a", voted=True, keeps=(NOW, NEXT)), newcomer("b"), member("c", voted=True, keeps=(NEXT,)))
    assert found.target == NEXT
    assert ways(found) == [(0, Way.FORWARD), (2, Way.COPY), (2, Way.FORWARD)]


def test_gradients_of_a_step_in_another_quorum_do_not_lead_to_the_target() -> None:
    other = State(5, 6)
    found = planned(
        member("a", other, keeps=(other,)), member("b", voted=True, keeps=(other,)), member("c", other, keeps=(other,))
    )
    assert found.target == other
    assert ways(found)[1] == (2, Way.COPY)


def test_gradients_of_another_attempt_do_not_mix() -> None:
    other = State(5, 6)
    found = planned(
        member("a", other, keeps=(other,)), member("b", NEXT, keeps=(NEXT,)), member("c", other, keeps=(other,))
    )
    assert (found.target, found.building) == (other, (1,))


def test_a_member_that_was_frozen_reads_its_shard_again() -> None:
    found = planned(member("a", NEXT, keeps=(NEXT,)), member("b", OLD), member("c", NEXT, keeps=(NEXT,)))
    assert (found.target, found.building) == (NEXT, (1,))
    assert (0, 1) in found.fills, "the copies that it keeps are old, too"


def test_the_member_in_the_seat_is_the_source_before_one_that_it_has_replaced() -> None:
    world = replace(WORLD, formed=5, seats=(WORLD.seats[0], Seat("x", "host x"), WORLD.seats[2]))
    sat = replace(newcomer("x"), shards=(Shard(world, 1, NOW),))
    found = planned(member("a"), member("b"), sat)
    assert ways(found)[1] == (2, Way.LIVE)
    assert [seat.replica_id for seat in found.world.seats] == ["a", "x", "b"]


def test_an_older_state_in_a_later_world_undoes_no_step() -> None:
    """A member was frozen when it alone had learned of that world. The others went on without it."""
    alone = World(3, 3, (Seat("z", "host z"),), 1)
    frozen = replace(newcomer("z"), shards=(Shard(alone, 0, OLD),))
    found = planned(member("a"), member("b"), member("c"), frozen)
    assert (found.previous, found.target) == (WORLD, NOW)


def test_new_shards_that_all_have_are_used_once_one_member_knows() -> None:
    cut = World(5, 5, (Seat("a", "host a"), Seat("c", "host c")), 1)
    knows = replace(member("a"), shards=(Shard(cut, 0, NOW),))
    not_yet = replace(member("c"), shards=(Shard(WORLD, 2, NOW), Shard(cut, 1, NOW, trial=True)))
    found = planned(knows, not_yet)
    assert (found.kind, found.world.number) == (Kind.REPLACED, 5)
    assert found.building == ()


def test_new_shards_of_which_no_member_knows_that_all_have_them_are_cut_again() -> None:
    cut = World(5, 5, (Seat("a", "host a"), Seat("c", "host c")), 1)
    both = [
        replace(member(name), shards=(Shard(WORLD, rank, NOW), Shard(cut, index, NOW, trial=True)))
        for index, (name, rank) in enumerate((("a", 0), ("c", 2)))
    ]
    found = planned(*both)
    assert (found.kind, found.previous) == (Kind.RESIZED, WORLD)


def test_new_shards_are_used_if_nothing_else_is_left() -> None:
    cut = World(5, 5, (Seat("a", "host a"),), 1)
    found = planned(replace(newcomer("a"), shards=(Shard(cut, 0, NOW, trial=True),)))
    assert (found.kind, found.target, found.world.number) == (Kind.REPLACED, NOW, 5)


def test_a_member_and_its_keeper_lost_together_lose_the_shard() -> None:
    found = planned(member("a"), newcomer("x"), newcomer("y"))
    assert (found.kind, found.missing, found.given_up) == (Kind.LOST, (1,), 4)


def test_a_copy_that_is_not_complete_is_no_source() -> None:
    assert planned(member("a"), member("c", keeps=())).kind is Kind.LOST


def test_a_step_of_a_member_that_was_cut_off_is_given_up() -> None:
    found = planned(member("a", State(5, 2)), member("b"), member("c"))
    assert (found.target, found.given_up) == (NOW, 1)
    assert ways(found)[0] == (1, Way.COPY)


def test_a_job_without_a_committed_step_begins_again() -> None:
    new = State(0, "new:job")
    assert planned(member("a", new, keeps=()), member("c", new, keeps=())).kind is Kind.FRESH
    assert planned(newcomer("a"), newcomer("b")).kind is Kind.FRESH


def test_schedulers_come_from_a_rank_whose_script_went_through_the_step() -> None:
    found = planned(replace(member("a"), whole=False), member("b"), member("c"))
    assert found.shared == 1
    keeps = (NOW, NEXT)
    late = [replace(member(name, voted=True, keeps=keeps), whole=True) for name in "bc"]
    found = planned(replace(member("a", NEXT, keeps=keeps), whole=False), *late)
    assert found.shared == 0, "the others have gone forward without their scripts"


def test_members_that_do_not_fill_the_mesh_wait() -> None:
    found = plan_recovery(7, [member("a"), member("b"), member("c")], copies=1, fits=lambda size: size % 2 == 0)
    assert found.kind is Kind.UNFIT


def test_all_ranks_of_a_member_are_counted() -> None:
    two = [replace(newcomer(name), group_rank=rank) for name in "ab" for rank in range(2)]
    found = plan_recovery(7, two, copies=1)
    assert (found.world.size, found.fills) == (4, ((0, 2), (1, 3), (2, 0), (3, 1)))
    with pytest.raises(ValueError, match="different numbers of ranks"):
        plan_recovery(7, two[:3], copies=1)
