"""Ranks of a job with one copy whose states are histories: the attempts that led to them, in place of bytes.

A state is right if its history is that of its name. A keeper stores, replays and frees as ``copies.keeper`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from keepstep.one_copy.core.copy_ledger import CopyLedger
from keepstep.one_copy.core.holding import Copy, Holding, Shard, State
from keepstep.one_copy.core.recovery_plan import Source, Way
from keepstep.one_copy.core.world import World, keepers

Attempt = tuple[int, int]
"""quorum_id, and the number of the attempt in that quorum."""
History = tuple[Attempt, ...]
"""The attempts whose gradients were applied."""
Key = tuple[int, int]
"""Number of a world, and rank in it."""


@dataclass(frozen=True)
class Message:
    """A part of a copy on its way to a keeper."""

    part: str
    state: State
    number: int = 0
    """Of the slice."""
    history: History = ()
    """Of a base."""
    attempt: Attempt = (0, 0)
    """Of gradients, and of the options with which they are applied."""


def base_messages(slices: int, state: State, history: History, due: int | None) -> list[Message]:
    """Return what is sent of a committed state: the base of slice ``due``; None: of all, and the end."""
    numbers = range(slices) if due is None else (due % slices,)
    end = [Message("end", state, attempt=history[-1] if history else (0, 0))] if due is None else []
    return [*(Message("base", state, number, history) for number in numbers), *end]


def step_messages(slices: int, following: State, attempt: Attempt) -> list[Message]:
    """Return what is sent of a step: the gradients of all slices, and the end."""
    gradients = [Message("gradients", following, number, attempt=attempt) for number in range(slices)]
    return [*gradients, Message("end", following, attempt=attempt)]


class KeptCopy:
    """The copy of one rank at a keeper."""

    def __init__(self, world: int, rank: int, slices: int) -> None:
        self.ledger = CopyLedger(world, rank, slices)
        self.slices = slices
        self.bases: dict[int, History] = {}
        self.gradients: dict[tuple[int, State], Attempt] = {}
        self.ends: dict[State, Attempt] = {}
        self._told: Copy | None = None

    @property
    def told(self) -> Copy:
        """The copy as the keeper tells it to others."""
        if self._told is None:
            self._told = self.ledger.copy()
        return self._told

    def copied(self) -> KeptCopy:
        other = KeptCopy(self.ledger.world, self.ledger.rank, self.slices)
        other.ledger._bases = list(self.ledger._bases)
        other.ledger._logs = [list(one) for one in self.ledger._logs]
        other.ledger._ends = list(self.ledger._ends)
        other.bases, other.gradients, other.ends = dict(self.bases), dict(self.gradients), dict(self.ends)
        return other

    def take(self, message: Message) -> None:
        state, number, self._told = message.state, message.number, None
        match message.part:
            case "base":
                for one in self.ledger.add_base(number, state):
                    self.gradients.pop((number, one), None)
                self.bases[number] = message.history
            case "gradients":
                for one in self.ledger.add_gradients(number, state):
                    self.gradients.pop((number, one), None)
                self.gradients[number, state] = message.attempt
            case _:
                for one in self.ledger.end_step(state):
                    self.ends.pop(one, None)
                self.ends[state] = message.attempt

    def rebuild(self, state: State) -> History:
        """Return the history of ``state``, which the ledger says can be rebuilt."""
        histories = set()
        for number in range(self.slices):
            _, steps = self.ledger.steps_to(number, state)
            history = self.bases[number]
            for one in steps:
                assert self.ends[one] == self.gradients[number, one], "options of another attempt"
                history = (*history, self.gradients[number, one])
            histories.add(history)
        (history,) = histories
        assert self.ends[state] == (history[-1] if history else (0, 0))
        return history


@dataclass(frozen=True)
class Rank:
    """One process, at one moment."""

    name: str
    """replica_id of its member."""
    group_rank: int = 0
    domain: str = ""
    shards: tuple[tuple[Shard, History], ...] = ()
    attempt: Attempt = (0, 0)
    """Of the gradients with which it has voted."""
    copies: dict[Key, KeptCopy] = field(default_factory=dict)
    """Complete ones. They are replaced, and never changed."""
    filling: dict[Key, KeptCopy] = field(default_factory=dict)
    whole: bool = True

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return max((shard.state.step for shard, _ in self.shards), default=0)

    def holding(self) -> Holding:
        return Holding(
            self.name,
            self.group_rank,
            self.domain or f"host of {self.name}",
            "",
            tuple(shard for shard, _ in self.shards),
            tuple(one.told for _, one in sorted(self.copies.items())),
            self.whole,
        )

    def histories(self, key: Key, state: State) -> Iterator[History]:
        """Yield the histories with which this process can bring the shard of a rank to ``state``."""
        for shard, history in self.shards:
            if (shard.world.number, shard.rank) == key:
                if shard.state == state:
                    yield history
                elif shard.next_state == state:
                    yield (*history, self.attempt)
        copy = self.copies.get(key)
        if copy is not None and state in copy.told.states:
            yield copy.rebuild(state)

    def read(self, previous: World, source: Source, target: State) -> History:
        """Return the history of the shard that a reader gets from here."""
        key = previous.number, source.rank
        if source.way is Way.COPY:
            assert target in self.copies[key].told.states
            return self.copies[key].rebuild(target)
        ((shard, history),) = [one for one in self.shards if (one[0].world.number, one[0].rank) == key]
        if source.way is Way.FORWARD:
            assert shard.next_state == target
            return (*history, self.attempt)
        assert shard.state == target
        return history

    # ---- what happens to it

    def settled(self, previous: World, source: Source, target: State) -> Rank:
        """Return it at the target of a recovery, with the shard that it is the source of."""
        history = self.read(previous, source, target)
        shard = next(shard for shard, _ in self.shards if shard.world.number == previous.number)
        return replace(self, shards=((replace(shard, state=target, voted=0, trial=False), history),), attempt=(0, 0))

    def with_trial(self, world: World, rank: int, target: State, history: History) -> Rank:
        """Return it with a new shard, beside that of an older world."""
        old = tuple(one for one in self.shards if one[0].world.number != world.number and one[0].state == target)
        return replace(self, shards=(*old, (Shard(world, rank, target, trial=True), history)), attempt=(0, 0))

    def adopted(self, world: World, rank: int) -> Rank:
        """Return it as a member of a world whose ranks all have their shards."""
        shard, history = next(one for one in self.shards if one[0].world.number == world.number)
        return replace(self, shards=((Shard(world, rank, shard.state), history),), attempt=(0, 0), whole=True)

    def voting(self, quorum_id: int, attempt: Attempt) -> Rank:
        ((shard, history),) = self.shards
        return replace(self, shards=((replace(shard, voted=quorum_id), history),), attempt=attempt)

    def committed(self, quorum_id: int, attempt: Attempt, kept: set[Key]) -> Rank:
        """Return it after a commit, with the copies of ``kept`` only."""
        ((shard, history),) = self.shards
        state = shard.state.after(quorum_id)
        shards = ((replace(shard, state=state, voted=0), (*history, attempt)),)
        copies = {key: one for key, one in self.copies.items() if key in kept}
        return replace(self, shards=shards, attempt=(0, 0), copies=copies, filling={})

    def with_copy(self, key: Key, copy: KeptCopy, *, complete: bool) -> Rank:
        if complete:
            filling = {one: value for one, value in self.filling.items() if one != key}
            return replace(self, copies={**self.copies, key: copy}, filling=filling)
        return replace(self, filling={**self.filling, key: copy})


def kept_by(world: World, replica_id: str, group_rank: int, copies: int) -> set[Key]:
    """Return the ranks whose copies a process keeps."""
    own = world.seat_of(replica_id)
    seats = range(len(world.seats))
    return {(world.number, world.rank(seat, group_rank)) for seat in seats if own in keepers(world, seat, copies)}
