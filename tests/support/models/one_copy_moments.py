"""All moments of a job with one copy, in which members may be lost: in a step, and in a recovery.

The actions of a process are a row of positions. A moment is a position of each process that the messages between them
allow. So no order of events has to be played, and a few thousand moments stand for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from keepstep.one_copy.core.holding import State
from keepstep.one_copy.core.recovery_plan import Kind, Recovery, Way, plan_recovery
from keepstep.one_copy.core.world import World, keepers
from tests.support.models.symbolic_copies import History, KeptCopy, Rank, base_messages, kept_by, step_messages

NEW = State(0, "new:job")
Copies = dict[int, tuple[KeptCopy, bool]]
"""By the seat of a keeper: the copy of one rank, and whether it is complete."""
Stage = tuple[int, Rank, Copies]
"""See ``Job._stages``."""


@dataclass(frozen=True)
class Group:
    """The members of a world, one rank each, before an attempt of a step."""

    world: World
    state: State
    history: History
    ranks: tuple[Rank, ...]
    """By seat."""
    fills: frozenset[tuple[int, int]]
    """Pairs of a rank and its keeper, which has no base yet."""
    turn: int = 0
    """Slice whose base is sent."""
    attempt: int = 1


@dataclass(frozen=True)
class Job:
    """Numbers that do not change."""

    copies: int
    slices: int

    # ---- a step

    def moments_of_step(self, group: Group, counts: Sequence[float]) -> Iterator[tuple[list[Rank], State]]:
        """Yield the moments of an attempt, each with the newest state that a rank has committed.

        Args:
            group: before it.
            counts: how many of the messages of a rank may have arrived at a keeper, as parts of all.
        """
        for chosen in itertools.product(*(self._positions(group, seat, counts) for seat in range(group.world.size))):
            phases = [phase for _, phase in chosen]
            if max(phases) < 2 or min(phases) > 0:
                newest = group.state.after(group.world.formed) if max(phases) == 2 else group.state
                yield self._moment(group, chosen), newest

    def after_step(self, group: Group, *, committed: bool = True) -> Group:
        """Return the members after a step that all have committed, or dropped."""
        last = [self._positions(group, seat, (1.0,)) for seat in range(group.world.size)]
        ranks = self._moment(group, [positions[-1 if committed else 0] for positions in last])
        if not committed:
            return replace(group, ranks=tuple(ranks), fills=frozenset(), turn=group.turn + 1, attempt=group.attempt + 1)
        (shard, history), *_ = ranks[0].shards
        return Group(group.world, shard.state, history, tuple(ranks), frozenset(), group.turn + 1)

    def _positions(self, group: Group, seat: int, counts: Sequence[float]) -> list[tuple[Copies, int]]:
        """Return the positions of a rank: what its keepers have, and whether it has voted (1) or committed (2)."""
        world, key = group.world, (group.world.number, seat)
        fill = any(rank == seat for rank, _ in group.fills)
        messages = base_messages(self.slices, group.state, group.history, None if fill else group.turn)
        base = len(messages)
        messages += step_messages(self.slices, group.state.after(world.formed), (world.formed, group.attempt))
        wanted = {round(one * len(messages)) for one in counts} | {len(messages)}
        rows: list[list[tuple[int, KeptCopy, bool]]] = []
        for keeper in keepers(world, seat, self.copies):
            copy = KeptCopy(world.number, seat, self.slices) if fill else group.ranks[keeper].copies[key].copied()
            row = [(keeper, copy.copied(), not fill)] if 0 in wanted else []
            for count, message in enumerate(messages, 1):
                copy.take(message)
                if count in wanted:
                    row.append((keeper, copy.copied(), not fill or count >= base))
            rows.append(row)
        kept = [{keeper: (copy, whole) for keeper, copy, whole in row} for row in itertools.product(*rows)]
        return [*((one, 0) for one in kept), (kept[-1], 1), (kept[-1], 2)]

    def _moment(self, group: Group, chosen: Sequence[tuple[Copies, int]]) -> list[Rank]:
        world, attempt = group.world, (group.world.formed, group.attempt)
        ranks = list(group.ranks)
        for seat, (_, phase) in enumerate(chosen):
            if phase:
                ranks[seat] = ranks[seat].voting(world.formed, attempt)
            if phase == 2:
                kept = kept_by(world, ranks[seat].name, 0, self.copies)
                ranks[seat] = ranks[seat].committed(world.formed, attempt, kept)
        return _with_copies(ranks, world, [copies for copies, _ in chosen], range(world.size))

    # ---- a recovery

    def plan(self, quorum_id: int, ranks: Sequence[Rank]) -> Recovery:
        return plan_recovery(quorum_id, [one.holding() for one in ranks], copies=self.copies)

    def moments_of_recovery(self, ranks: Sequence[Rank], recovery: Recovery) -> Iterator[list[Rank]]:
        """Yield the moments before all members have adopted the new world."""
        rows = [self._stages(ranks, recovery, index) for index in range(len(ranks))]
        needs = _needs(ranks, recovery)
        for chosen in itertools.product(*rows):
            if _is_moment([stage for stage, _, _ in chosen], needs):
                yield _moment_of_recovery(ranks, recovery, chosen)

    def after_recovery(self, ranks: Sequence[Rank], recovery: Recovery, turn: int = 0) -> Group:
        """Return the members when all have adopted the new world."""
        last = [self._stages(ranks, recovery, index)[-1] for index in range(len(ranks))]
        seats = [_seat(recovery.world, one) for one in ranks]
        after = _with_copies([rank for _, rank, _ in last], recovery.world, [one for _, _, one in last], seats)
        ordered = tuple(after[seats.index(seat)] for seat in range(len(seats)))
        fills = () if recovery.kind is Kind.RESIZED else recovery.fills
        (shard, history) = ordered[0].shards[0]
        return Group(recovery.world, shard.state, history, ordered, frozenset(fills), turn)

    def _stages(self, ranks: Sequence[Rank], recovery: Recovery, index: int) -> list[Stage]:
        """Return what a rank does in a recovery.

        Stages: 0 nothing yet; 1 its shard is at the target; 2 it has its new shard; 3 its keepers have the base of a
        shard that was cut again; 4 it has learned that all are ready.
        """
        world, own = recovery.world, ranks[index]
        seat = _seat(world, own)
        rows: list[Stage] = [(0, own, {})]
        if recovery.kind is Kind.FRESH:
            now = own.with_trial(world, seat, NEW, ())
            return [*rows, (3, now, {}), (4, now.adopted(world, seat), {})]
        previous, target = recovery.previous, recovery.target
        assert previous is not None
        assert target is not None
        now = own
        for source in recovery.sources:
            if source.holder == index and source.way is not Way.COPY:
                now = own.settled(previous, source, target)
                rows.append((1, now, {}))
        if seat in recovery.building:
            source = recovery.sources[seat if recovery.kind is Kind.REPLACED else 0]
            history = ranks[source.holder].read(previous, source, target)
            now = now.with_trial(world, seat, target, history)
        else:
            ((shard, history),) = now.shards
            now = replace(now, shards=((replace(shard, world=world), history),))
        rows.append((2, now, {}))
        full: Copies = {}
        if recovery.kind is Kind.RESIZED:
            for count in range(self.slices + 2):
                copy = KeptCopy(world.number, seat, self.slices)
                for message in base_messages(self.slices, target, history, None)[:count]:
                    copy.take(message)
                full = dict.fromkeys(keepers(world, seat, self.copies), (copy, count > self.slices))
                rows.append((2, now, full))
        return [*rows, (3, now, full), (4, now.adopted(world, seat), full)]


def start(job: Job, names: Sequence[str], steps: int) -> Group:
    """Return the members of a new job after some steps."""
    ranks = [Rank(name) for name in names]
    group = job.after_recovery(ranks, job.plan(1, ranks))
    for _ in range(steps):
        group = job.after_step(group)
    return group


def _seat(world: World, rank: Rank) -> int:
    seat = world.seat_of(rank.name)
    assert seat is not None
    return seat


def _needs(ranks: Sequence[Rank], recovery: Recovery) -> list[list[int]]:
    """Return for each rank whose shards it waits for, because it reads them."""
    live = {one.rank: one.holder for one in recovery.sources if one.way is not Way.COPY}
    if recovery.kind is not Kind.REPLACED:
        return [list(live.values()) for _ in ranks]
    seats = [_seat(recovery.world, one) for one in ranks]
    return [[live[seat]] if seat in recovery.building and seat in live else [] for seat in seats]


def _is_moment(stages: Sequence[int], needs: Sequence[Sequence[int]]) -> bool:
    """Return whether ranks can be at these stages, and have not all adopted the world."""
    low = min(stages)
    return low < 4 and all(
        (stage < 2 or all(stages[one] >= 1 for one in waits)) and (stage < 3 or low >= 2) and (stage < 4 or low >= 3)
        for stage, waits in zip(stages, needs, strict=True)
    )


def _moment_of_recovery(ranks: Sequence[Rank], recovery: Recovery, chosen: Sequence[Stage]) -> list[Rank]:
    seats = [_seat(recovery.world, one) for one in ranks]
    moment = [rank for _, rank, _ in chosen]
    return _with_copies(moment, recovery.world, [copies for _, _, copies in chosen], seats)


def _with_copies(ranks: list[Rank], world: World, copies: Sequence[Copies], seats: Sequence[int]) -> list[Rank]:
    """Give keepers what has arrived at them. ``copies`` and ``ranks`` are in the order of ``seats``."""
    at = {seat: index for index, seat in enumerate(seats)}
    for seat, kept in zip(seats, copies, strict=True):
        for keeper, (copy, complete) in kept.items():
            key = world.number, seat
            ranks[at[keeper]] = ranks[at[keeper]].with_copy(key, copy, complete=complete)
    return ranks


def check_copies(job: Job, group: Group, ranks: Sequence[Rank], newest: State) -> None:
    """Check that a committed state can be rebuilt by all keepers, but those that have no base yet."""
    for seat in range(group.world.size):
        for keeper in keepers(group.world, seat, job.copies):
            if newest == group.state and any(rank == seat for rank, _ in group.fills):
                continue
            copy = ranks[keeper].copies[group.world.number, seat]
            assert newest in copy.told.states, f"keeper {keeper} cannot rebuild rank {seat} at {newest}"
            history = copy.rebuild(newest)
            expected = group.history if newest == group.state else (*group.history, (group.world.formed, group.attempt))
            assert history == expected, "a keeper rebuilds another state of that name"
            assert len(copy.gradients) <= job.slices * (job.slices + 2), "the log grows"
