"""Conditions that the plan of a recovery of a job with one copy must meet, whatever the ranks have."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Way
from keepstep.one_copy.core.world import World, keepers
from tests.support.models.symbolic_copies import History, Rank


def obtainable(ranks: Sequence[Rank], world: World, state: State) -> bool:
    """Return whether the shards of all ranks of a world can be brought to ``state``, found without the plan."""
    return all(any(True for one in ranks for _ in one.histories((world.number, r), state)) for r in range(world.size))


def check_plan(ranks: Sequence[Rank], recovery: Recovery, copies: int, *, may_lose: bool) -> None:
    """Check a plan against all that the ranks have.

    Args:
        ranks: of all members, in the order of the quorum.
        recovery: the plan.
        copies: number of keepers of each rank.
        may_lose: whether a member and its keepers are away, or a member was cut off, so that a step may be lost.
    """
    shards = [shard for one in ranks for shard, _ in one.shards]
    if recovery.kind is Kind.FRESH:
        assert all(shard.state.step == 0 for shard in shards), "committed steps are forgotten"
        return
    if recovery.kind is Kind.LOST:
        assert may_lose, "shards are lost"
        assert not any(obtainable(ranks, one.world, one.state) for one in shards), "a state that can be had is given up"
        return
    previous, target = recovery.previous, recovery.target
    assert previous is not None
    assert target is not None
    assert len(recovery.sources) == previous.size
    histories = {ranks[one.holder].read(previous, one, target) for one in recovery.sources}
    assert len(histories) == 1, f"states of {len(histories)} histories mix: {histories}"
    (history,) = histories
    best = max(shards, key=lambda one: one.state.worth)
    if best.state.worth > target.worth:
        assert may_lose, "a committed step is lost"
        assert recovery.given_up == max(0, best.state.step - target.step)
        assert not any(obtainable(ranks, one.world, best.state) for one in shards if one.state == best.state)
    else:
        assert recovery.given_up == 0
    if recovery.kind is Kind.REPLACED:
        _check_seats(recovery, ranks)
    _check_shared(recovery, ranks)
    _check_kept(copies, recovery, ranks, history)


def _check_seats(recovery: Recovery, ranks: Sequence[Rank]) -> None:
    """Check that members of the world that was formed last keep their seats, and the shards that they can use."""
    world, target = recovery.world, recovery.target
    assert target is not None
    known = [shard for one in ranks for shard, _ in one.shards if shard.world.number == world.number]
    latest = max((one for one in known), key=lambda one: (not one.trial, one.world.formed)).world
    for seat, before in enumerate(latest.seats):
        assert before.replica_id in (world.seats[seat].replica_id, *_away(latest, ranks)), "a member changes its seat"
    for one in ranks:
        sat = latest.seat_of(one.name)
        rank = world.rank(sat, one.group_rank) if sat is not None else -1
        usable = any(
            (shard.world.number, shard.rank) == (world.number, rank) and shard.state == target
            for shard, _ in one.shards
        )
        assert not (usable and rank in recovery.building), "a member builds although it has its shard"


def _away(world: World, ranks: Sequence[Rank]) -> set[str]:
    return {one.replica_id for one in world.seats}.difference(one.name for one in ranks)


def _check_shared(recovery: Recovery, ranks: Sequence[Rank]) -> None:
    ways = {one.way for one in recovery.sources if one.holder == recovery.shared}
    best = min((one.way for one in recovery.sources), key=list(Way).index)
    assert best in ways, "another rank has fresher schedulers"


def _check_kept(copies: int, recovery: Recovery, ranks: Sequence[Rank], history: History) -> None:
    """Check that a keeper that is not filled has what it needs, and that its owner can go on."""
    world, target = recovery.world, recovery.target
    assert target is not None
    at = {(one.name, one.group_rank): one for one in ranks}
    holders = [at[seat.replica_id, group_rank] for seat in world.seats for group_rank in range(world.ranks_per_seat)]
    assert len(holders) == len(ranks)
    for rank, holder in enumerate(holders):
        seat, group_rank = divmod(rank, world.ranks_per_seat)
        for keeper in (world.rank(one, group_rank) for one in keepers(world, seat, copies)):
            if (rank, keeper) not in recovery.fills:
                assert holders[keeper].copies[world.number, rank].rebuild(target) == history
        if rank not in recovery.building:
            assert any((shard.world.number, shard.rank) == (world.number, rank) for shard, _ in holder.shards)
