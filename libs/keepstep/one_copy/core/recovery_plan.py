"""Decide after a change of members how the job continues. All ranks compute equal plans from equal holdings.

Rules:

1. Candidates are the states that a shard or a copy of a living rank shows to be committed, each in its world. The state
   of the highest worth comes first: a rank that was frozen may have an older state in a later world. Of equal states,
   that of a world comes first of which a living rank knows that all ranks had their shards, then that of the latest.
2. A candidate is possible if each rank of its world has a source: a living rank at that state; one that voted for it
   and still has its gradients, which then goes *forward*; or a keeper that can rebuild it. The first possible candidate
   is the *target*. A better one, which only ranks that were cut off from the others have reached, is given up.
3. All ranks continue at the target: a rank with another state, or of another world, is a newcomer.
4. If the number of members is that of the world, its members keep their seats and their shards, and newcomers read the
   shards of the empty seats. Otherwise the shards are cut again, and all ranks read.
5. No candidate is possible: the job begins, if it has not committed a step yet. Otherwise shards are lost, and the job
   resumes from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from keepstep.one_copy.core.holding import Holding, Shard, State
from keepstep.one_copy.core.world import World, form_world, keepers
from keepstep_mesh.protocol.lineage import Soundness, soundness


class Kind(Enum):
    """How the job continues."""

    FRESH = "fresh"
    """No step was committed: all build the model."""
    REPLACED = "replaced"
    """The shards stay as they are cut; newcomers, if any, read theirs."""
    RESIZED = "resized"
    """The shards are cut again, for another number of members."""
    LOST = "lost"
    """Shards are lost."""
    RESUMED = "resumed"
    """In place of ``FRESH`` or ``LOST``: all build the model, and load a checkpoint."""
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
    """Number of steps that a living rank has committed beyond the target; with ``LOST`` all of its steps."""


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
    lost: tuple[World, tuple[int, ...]] | None = None
    for previous, target in _candidates(holdings):
        found = [_source(rank, previous, target, holdings) for rank in range(previous.size)]
        sources = tuple(one for one in found if one is not None)
        if len(sources) == previous.size:
            world = form_world(quorum_id, members, ranks_per_seat, previous)
            return _continued(world, previous, target, sources, holdings, copies)
        if lost is None and soundness(target.step, target.lineage) is not Soundness.UNTRAINED:
            lost = previous, tuple(rank for rank, one in enumerate(found) if one is None)
    return Recovery(
        Kind.LOST if lost else Kind.FRESH,
        fresh,
        lost[0] if lost else None,
        building=tuple(range(fresh.size)),
        fills=_pairs(fresh, copies),
        missing=lost[1] if lost else (),
        given_up=_steps_beyond(None, holdings),
    )


def _shards(holdings: Sequence[Holding]) -> Iterator[Shard]:
    return (shard for one in holdings for shard in one.shards)


def _candidates(holdings: Sequence[Holding]) -> list[tuple[World, State]]:
    """Return the states that are known as committed, with their worlds, best first."""
    worlds: dict[int, tuple[bool, int, World]] = {}
    for shard in _shards(holdings):
        found = not shard.trial, shard.world.formed, shard.world
        worlds[shard.world.number] = max(worlds.get(shard.world.number, found), found, key=lambda one: one[:2])
    known = {(shard.state, shard.world.number) for shard in _shards(holdings)}
    known |= {(copy.committed, copy.world) for one in holdings for copy in one.copies if copy.committed is not None}
    ordered = sorted(
        ((state, *worlds[number]) for state, number in known if number in worlds),
        key=lambda one: (one[0].worth, one[1], one[3].number),
        reverse=True,
    )
    return [(world, state) for state, _, _, world in ordered]


def _source(rank: int, previous: World, target: State, holdings: Sequence[Holding]) -> Source | None:
    """Return where the shard of ``rank`` of ``previous`` is, for the state ``target``. None: nowhere.

    A member that another one has replaced may be back: its shard counts after that of the member in the seat.
    """
    seat = previous.seats[rank // previous.ranks_per_seat]
    best: tuple[int, bool, int] | None = None
    ways = list(Way)
    for index, one in enumerate(holdings):
        for way in _ways(one, previous.number, rank, target):
            found = ways.index(way), one.replica_id != seat.replica_id, index
            best = min(best or found, found)
    return Source(rank, best[2], ways[best[0]]) if best is not None else None


def _ways(holding: Holding, number: int, rank: int, target: State) -> Iterator[Way]:
    """Yield the ways in which a rank can bring the shard of ``rank`` to ``target``."""
    for shard in holding.shards:
        if (shard.world.number, shard.rank) == (number, rank):
            if shard.state == target:
                yield Way.LIVE
            elif shard.next_state == target:
                yield Way.FORWARD
    if _keeps(holding, number, rank, target):
        yield Way.COPY


def _steps_beyond(target: State | None, holdings: Sequence[Holding]) -> int:
    """Return the number of steps that a living rank has committed beyond ``target``; None: at all."""
    base, step = (target.worth, target.step) if target is not None else ((), 0)
    return max((shard.state.step - step for shard in _shards(holdings) if shard.state.worth > base), default=0)


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
    ways = list(Way)
    shared = min(sources, key=lambda one: (ways.index(one.way), not holdings[one.holder].whole)).holder
    if world.number != previous.number:
        everyone = tuple(range(world.size))
        kind, building, fills = Kind.RESIZED, everyone, _pairs(world, copies)
    else:
        kind = Kind.REPLACED
        building = tuple(one.rank for one in sources if one.way is Way.COPY or one.holder != holder[one.rank])
        fills = tuple(
            (rank, keeper)
            for rank, keeper in _pairs(world, copies)
            if not _keeps(holdings[holder[keeper]], world.number, rank, target)
        )
    return Recovery(
        kind, world, previous, target, sources, building, shared, fills, given_up=_steps_beyond(target, holdings)
    )


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
