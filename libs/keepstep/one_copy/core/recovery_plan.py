"""Decide after a change of members how the job continues. All ranks compute equal plans from equal holdings.

Rules:

1. Candidates are the states that a living rank, or a copy at a living keeper, shows to be committed. The world of the
   latest number in which a living rank has its shard comes first, and in it the state of the highest worth.
2. A candidate is possible if each rank of its world has a source: a living rank at that state; one that voted for it
   and still has its gradients, which then goes *forward*; or a keeper that can rebuild it. The first possible candidate
   is the *target*. A state that only some living ranks have reached, and that is not possible, is given up.
3. All ranks continue at the target: a rank with another state, or of another world, is a newcomer.
4. If the number of members is that of the world, its members keep their seats and their shards, and newcomers read the
   shards of the empty seats. Otherwise the shards are cut again, and all ranks read.
5. No candidate, or no step was committed: the job begins. No possible one: the shards are lost, and the job resumes
   from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from keepstep.one_copy.core.holding import Holding, State
from keepstep.one_copy.core.world import World, form_world, keepers


class Kind(Enum):
    """How the job continues."""

    FRESH = "fresh"
    """No rank has a shard: all build the model."""
    REPLACED = "replaced"
    """The shards stay as they are cut; newcomers, if any, read theirs."""
    RESIZED = "resized"
    """The shards are cut again, for another number of members."""
    LOST = "lost"
    """Shards are lost."""
    UNFIT = "unfit"
    """The mesh does not fit this number of ranks: wait for other members."""


class Way(Enum):
    """How the shard of a rank comes to the target."""

    LIVE = "live"
    FORWARD = "forward"
    """Its holder applies gradients first."""
    COPY = "copy"
    """Its keeper rebuilds it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the shard of one rank of the previous world is."""

    rank: int
    """In the previous world."""
    holder: int
    """Index into the holdings."""
    way: Way


@dataclass(frozen=True, slots=True)
class Recovery:
    """How the job continues after a change of members."""

    kind: Kind
    world: World
    """The members in their seats from now on."""
    previous: World | None = None
    """The world of ``sources``."""
    target: State | None = None
    """At which all ranks continue; None with ``FRESH`` and ``LOST``."""
    sources: tuple[Source, ...] = ()
    """One for each rank of ``previous``, in order."""
    building: tuple[int, ...] = ()
    """Ranks of ``world`` that build the model and read their shard."""
    shared: int = 0
    """Index of the holding that has schedulers, samplers and the like at the target."""
    fills: tuple[tuple[int, int], ...] = ()
    """Pairs of ranks of ``world``: the first sends a whole base to the second, its keeper."""
    missing: tuple[int, ...] = ()
    """Ranks of ``previous`` without a source, at the best candidate; with ``LOST``."""
    given_up: int = 0
    """Number of steps that a living rank has committed beyond the target."""


def plan_recovery(
    quorum_id: int, holdings: Sequence[Holding], *, copies: int, fits: Callable[[int], bool] = lambda _: True
) -> Recovery:
    """Return how the job continues.

    Args:
        quorum_id: of the quorum of all ``holdings``.
        holdings: of each rank of each member: members in the order of the quorum, and their ranks in order.
        copies: number of keepers of each rank.
        fits: whether the mesh fits a number of ranks.

    Raises:
        ValueError: the members have different numbers of ranks.
    """
    members = [one.seat for one in holdings if one.group_rank == 0]
    ranks_per_seat, rest = divmod(len(holdings), len(members))
    if rest or [one.group_rank for one in holdings] != list(range(ranks_per_seat)) * len(members):
        raise ValueError("the members have different numbers of ranks: start all with the same --nproc")
    fresh = form_world(quorum_id, members, ranks_per_seat, None)
    if not fits(fresh.size):
        return Recovery(Kind.UNFIT, fresh)
    best: Recovery | None = None
    for previous, target in _candidates(holdings):
        sources = [_source(rank, previous.number, target, holdings) for rank in range(previous.size)]
        found = tuple(one for one in sources if one is not None)
        if len(found) == previous.size:
            world = form_world(quorum_id, members, ranks_per_seat, previous)
            return _continued(world, previous, target, found, holdings, copies)
        if best is None:
            missing = tuple(rank for rank, one in enumerate(sources) if one is None)
            best = Recovery(Kind.LOST, fresh, previous, sources=found, missing=missing)
    everyone = tuple(range(fresh.size))
    if best is None or not any(one.state is not None and one.state.step for one in holdings):
        best = Recovery(Kind.FRESH, fresh)  # before the first commit nothing is lost
    return Recovery(
        best.kind,
        fresh,
        best.previous,
        building=everyone,
        fills=_pairs(fresh, copies),
        missing=best.missing,
        given_up=max((one.state.step for one in holdings if one.state is not None), default=0),
    )


def _candidates(holdings: Sequence[Holding]) -> Iterator[tuple[World, State]]:
    """Yield the states that are known as committed, with their worlds, best first."""
    worlds: dict[int, World] = {}
    states: dict[int, set[State]] = {}
    for one in holdings:
        if one.world is None or one.state is None:
            continue
        number = one.world.number
        if number not in worlds or one.world.formed > worlds[number].formed:
            worlds[number] = one.world
        states.setdefault(number, set()).add(one.state)
    for copy in (copy for one in holdings for copy in one.copies):
        if copy.world in worlds and copy.committed is not None:
            states[copy.world].add(copy.committed)
    for number in sorted(worlds, reverse=True):
        for state in sorted(states[number], key=lambda state: state.worth, reverse=True):
            yield worlds[number], state


def _source(rank: int, number: int, target: State, holdings: Sequence[Holding]) -> Source | None:
    """Return where the shard of ``rank`` of the world with ``number`` is, for the state ``target``."""
    ways: dict[Way, int] = {}
    latest = -1
    for index, one in enumerate(holdings):
        if one.rank_in(number) == rank:
            way = Way.LIVE if one.state == target else Way.FORWARD if one.next_state == target else None
            formed = one.world.formed if one.world is not None else 0
            if way is not None and (way not in ways or formed > latest):  # a member that was replaced may be back
                ways[way], latest = index, formed
        if any((copy.world, copy.rank) == (number, rank) and target in copy.states for copy in one.copies):
            ways.setdefault(Way.COPY, index)
    return next((Source(rank, ways[way], way) for way in Way if way in ways), None)


def _continued(
    world: World,
    previous: World,
    target: State,
    sources: tuple[Source, ...],
    holdings: Sequence[Holding],
    copies: int,
) -> Recovery:
    """Return the plan for a target that is possible."""
    at = {(one.replica_id, one.group_rank): index for index, one in enumerate(holdings)}
    holder = [
        at[seat.replica_id, group_rank] for seat in world.seats for group_rank in range(world.ranks_per_seat)
    ]  # of each rank of the new world
    live = [one.holder for one in sources if one.way is Way.LIVE]
    shared = next((index for index in live if holdings[index].whole), live[0] if live else sources[0].holder)
    given_up = max((one.state.step for one in holdings if one.state is not None), default=0) - target.step
    if world.number != previous.number:
        everyone = tuple(range(world.size))
        kind, building, fills = Kind.RESIZED, everyone, _pairs(world, copies)
    else:
        kind = Kind.REPLACED
        building = tuple(one.rank for one in sources if one.way is Way.COPY or one.holder != holder[one.rank])
        fills = tuple(
            (rank, keeper)
            for rank, keeper in _pairs(world, copies)
            if rank in building or not _keeps(holdings[holder[keeper]], world.number, rank, target)
        )
    return Recovery(kind, world, previous, target, sources, building, shared, fills, given_up=max(0, given_up))


def _keeps(holding: Holding, number: int, rank: int, target: State) -> bool:
    """Return whether a rank has a copy of ``rank`` at ``target``."""
    return any((copy.world, copy.rank) == (number, rank) and target in copy.states for copy in holding.copies)


def _pairs(world: World, copies: int) -> tuple[tuple[int, int], ...]:
    """Return all pairs of a rank and a keeper of it."""
    return tuple(
        (world.rank(seat, group_rank), world.rank(keeper, group_rank))
        for seat in range(len(world.seats))
        for group_rank in range(world.ranks_per_seat)
        for keeper in keepers(world, seat, copies)
    )
