from __future__ import annotations

from keepstep.one_copy.core.world import Seat, World, form_world, keepers, unkept


def seats(*names: str) -> tuple[Seat, ...]:
    """``a@x`` is the member a in the failure domain x."""
    return tuple(Seat(name.partition("@")[0], name.partition("@")[2] or name) for name in names)


def names(world: World) -> str:
    return " ".join(seat.replica_id for seat in world.seats)


def test_ranks_are_counted_seat_by_seat() -> None:
    world = World(1, 1, seats("a", "b"), 4)
    assert (world.size, world.rank(1, 2)) == (8, 6)
    assert (world.seat_of("b"), world.seat_of("c")) == (1, None)


def test_a_first_world_has_the_members_in_the_order_of_the_quorum() -> None:
    world = form_world(3, seats("a", "b"), 2, None)
    assert (world.number, world.formed, names(world)) == (3, 3, "a b")


def test_members_keep_their_seats_while_their_number_stays() -> None:
    world = form_world(5, seats("a", "d", "e"), 1, World(1, 2, seats("b", "a", "c"), 1))
    assert (world.number, world.formed, names(world)) == (1, 5, "d a e")


def test_seats_are_packed_when_the_number_changes() -> None:
    before = World(1, 2, seats("b", "a", "c"), 1)
    assert names(form_world(5, seats("a", "b"), 1, before)) == "b a"
    assert names(form_world(5, seats("a", "b", "c", "0"), 1, before)) == "b a c 0"
    assert form_world(5, seats("a", "b"), 1, before).number == 5


def test_a_member_on_another_host_takes_its_seat_there() -> None:
    world = form_world(5, seats("a@y", "b"), 1, World(1, 1, seats("a@x", "b"), 1))
    assert world.seats == seats("a@y", "b")


def test_the_keeper_is_the_next_seat_in_the_ring() -> None:
    world = World(1, 1, seats("a", "b", "c"), 1)
    assert [keepers(world, seat, 1) for seat in range(3)] == [(1,), (2,), (0,)]
    assert keepers(world, 1, 2) == (2, 0)
    assert keepers(world, 1, 9) == (2, 0), "all others"


def test_a_keeper_is_in_another_failure_domain_where_there_is_one() -> None:
    world = World(1, 1, seats("a@x", "b@x", "c@y", "d@y"), 1)
    assert [keepers(world, seat, 1) for seat in range(4)] == [(2,), (2,), (0,), (0,)]


def test_two_keepers_are_in_different_failure_domains_where_there_are_two() -> None:
    world = World(1, 1, seats("a@x", "b@y", "c@y", "d@z"), 1)
    assert keepers(world, 0, 2) == (1, 3)
    assert keepers(world, 0, 3) == (1, 3, 2)


def test_members_of_one_domain_keep_each_other_if_there_is_no_other() -> None:
    assert keepers(World(1, 1, seats("a@x", "b@x"), 1), 0, 1) == (1,)
    assert keepers(World(1, 1, seats("a"), 1), 0, 1) == ()


def test_shards_are_lost_with_a_member_and_all_of_its_keepers() -> None:
    world = World(1, 1, seats("a", "b", "c", "d"), 2)
    assert unkept(world, {1}, 1) == unkept(world, {0, 2}, 1) == set()
    assert unkept(world, {1, 2}, 1) == {1}
    assert unkept(world, {1, 2}, 2) == set()
    assert unkept(world, {3, 0, 1}, 2) == {3}
    assert unkept(World(1, 1, seats("a"), 2), {0}, 1) == {0}
