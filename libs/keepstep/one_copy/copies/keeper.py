"""The copies that this process keeps of ranks of other members, in main memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from keepstep.one_copy.copies.frames import CopyError
from keepstep.one_copy.copies.kept_bytes import Memory, Stored
from keepstep.one_copy.copies.rank_state import Boxes
from keepstep.one_copy.copies.replay import replay
from keepstep.one_copy.core.copy_ledger import CopyLedger
from keepstep.one_copy.core.holding import Copy, State


@dataclass
class KeptRank:
    """The copy of one rank."""

    ledger: CopyLedger
    names: list[list[str]]
    """Of the parameters of each slice."""
    whole: bool
    """Whether a step brings the state after it, and not gradients: the optimizer cannot be replayed."""
    boxes: Boxes
    quorum_id: int
    """Of the quorum in which its owner took its place."""
    bases: dict[int, Stored] = field(default_factory=dict)
    gradients: dict[tuple[int, State], Stored] = field(default_factory=dict)
    """By slice, and by the state to which they lead."""
    ends: dict[State, Stored] = field(default_factory=dict)
    """Options, buffers and random state by the state that they belong to."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        stored = (*self.bases.values(), *self.gradients.values(), *self.ends.values())
        return sum(one.nbytes for one in stored)


class Keeper:
    """Keeps copies of several ranks. Safe to use from any thread.

    Args:
        kind: makes an optimizer of the class of the job.
        device: returns the one on which replayed steps are computed.
        limit: returns how many more bytes may be kept.
    """

    def __init__(
        self, kind: Callable[..., Optimizer], device: Callable[[], torch.device], limit: Callable[[], int]
    ) -> None:
        self._kind = kind
        self.device = device
        self._limit = limit
        self._lock = threading.Lock()
        self._ranks: dict[tuple[int, int], KeptRank] = {}
        self._filling: dict[tuple[int, int], KeptRank] = {}
        """Copies that are not complete. Those that they replace are kept until then."""
        self.memory = Memory()
        """Of the bytes that arrive."""

    def begin(
        self,
        world: int,
        rank: int,
        quorum_id: int,
        names: list[list[str]],
        need: int,
        *,
        whole: bool,
        fill: bool,
        boxes: Boxes,
        again: bool = False,
    ) -> int | None:
        """Keep copies of a rank from now on.

        The process that takes the place of a lost owner goes on with the copy from which it was rebuilt.

        Args:
            world: number of the world.
            rank: in that world.
            quorum_id: of the quorum in which the owner took its place. A process that was frozen, and whose place
                another one has, is refused.
            names: of the parameters of each slice.
            need: bytes that the copies will have.
            whole: see ``KeptRank``.
            fill: a whole base comes. The copy that is kept of this rank is void when it is complete. False: the owner
                goes on with that copy, if its slices are those that are kept.
            boxes: of the shard of the rank.
            again: it had no copies here for some steps: what is kept of it is of no use.

        Returns:
            The slice whose next base is due first, if the owner goes on with a copy; None: a whole base must come.

        Raises:
            CopyError: no memory is left for it, or another process has the place of the owner.
        """
        with self._lock:
            known = [one for one in (self._ranks.get((world, rank)), self._filling.get((world, rank))) if one]
            if any(one.quorum_id > quorum_id for one in known):
                raise CopyError(f"another process has the place of rank {rank} of world {world}")
            kept = self._ranks.get((world, rank))
            if not fill and kept is not None and (kept.names, kept.whole) == (names, whole):
                kept.quorum_id = quorum_id
                self._filling.pop((world, rank), None)
                return kept.ledger.oldest
            if again:
                self._ranks.pop((world, rank), None)
                self._filling.pop((world, rank), None)
            for one in known:
                one.quorum_id = quorum_id  # its owner of before brings nothing more
        if again:
            known.clear()
            self.memory.clear()
        room = self._limit()
        if need > room:
            raise CopyError(f"copies of {need / 1e6:.0f} MB do not fit into the {room / 1e6:.0f} MB that are free here")
        with self._lock:
            self._filling[world, rank] = KeptRank(CopyLedger(world, rank, len(names)), names, whole, boxes, quorum_id)
        return None

    def take(self, world: int, rank: int, quorum_id: int, part: str, state: State, number: int, stored: Stored) -> None:
        """Keep a part of the copy of a rank, which its owner has sent.

        Args:
            world: number of the world.
            rank: in that world.
            quorum_id: as in ``begin``.
            part: ``base``, ``gradients`` or ``end``.
            state: to which it belongs; of gradients the one to which they lead.
            number: of the slice.
            stored: the part.

        Raises:
            CopyError: the copy was not begun.
        """
        with self._lock:
            kept = self._owned(world, rank, quorum_id)
            match part:
                case "base":
                    for one in kept.ledger.add_base(number, state):
                        kept.gradients.pop((number, one), None)
                    kept.bases[number] = stored
                case "gradients":
                    for one in kept.ledger.add_gradients(number, state):
                        kept.gradients.pop((number, one), None)
                    kept.gradients[number, state] = stored
                case "end":
                    for one in kept.ledger.end_step(state):
                        kept.ends.pop(one, None)
                    kept.ends[state] = stored
                    if kept.ledger.complete and self._filling.pop((world, rank), None) is not None:
                        self._ranks[world, rank] = kept
                case other:
                    raise CopyError(f"unknown part {other!r} of a copy")

    def _owned(self, world: int, rank: int, quorum_id: int) -> KeptRank:
        kept = self._filling.get((world, rank)) or self._ranks.get((world, rank))
        if kept is None:
            raise CopyError(f"the copy of rank {rank} was not begun")
        if kept.quorum_id != quorum_id:
            raise CopyError(f"another process has the place of rank {rank} of world {world}")
        return kept

    def commit(self, world: int, rank: int, quorum_id: int, state: State) -> None:
        """Note that ``state`` was committed. If steps bring whole states, it becomes the base.

        Raises:
            CopyError: as ``take``.
        """
        with self._lock:
            kept = self._owned(world, rank, quorum_id)
            if not kept.whole:
                return
            for number in range(len(kept.bases)):
                if (stored := kept.gradients.get((number, state))) is not None:
                    kept.bases[number] = stored
                    for one in kept.ledger.add_base(number, state):
                        kept.gradients.pop((number, one), None)

    def has(self, world: int, rank: int, state: State) -> bool:
        """Return whether a rank can be rebuilt at ``state``."""
        with self._lock:
            kept = self._ranks.get((world, rank))
            return kept is not None and state in kept.ledger.states()

    def give_up(self, world: int, rank: int, quorum_id: int) -> None:
        """Free a copy of a rank that is not complete, because no memory is left."""
        with self._lock:
            filling = self._filling.get((world, rank))
            if filling is not None and filling.quorum_id == quorum_id:
                del self._filling[world, rank]
        del filling
        self.memory.clear()

    def copies(self) -> tuple[Copy, ...]:
        """Return what can be rebuilt."""
        with self._lock:
            return tuple(one.ledger.copy() for one in self._ranks.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all copies, and of memory for those that arrive next."""
        with self._lock:
            copies = sum(one.nbytes for one in (*self._ranks.values(), *self._filling.values()))
        return copies + self.memory.free_bytes

    def forget(self, *, but: set[tuple[int, int]]) -> None:
        """Free all copies but those of these worlds and ranks."""
        with self._lock:
            known = self._ranks.keys() | self._filling.keys()
            self._ranks = {key: one for key, one in self._ranks.items() if key in but}
            self._filling = {key: one for key, one in self._filling.items() if key in but}
        if not known <= but:
            self.memory.clear()

    def rebuild(self, world: int, rank: int, state: State, number: int) -> dict[str, Any]:
        """Return a slice of a rank at ``state``.

        Raises:
            CopyError: it cannot be rebuilt.
        """
        with self._lock:
            kept = self._kept(world, rank, state)
            _, steps = kept.ledger.steps_to(number, state)
            base = kept.bases[number]
            if kept.whole and steps:
                base, steps = kept.gradients[number, steps[-1]], []
            log = [(kept.ends[one], kept.gradients[number, one]) for one in steps]
        ends = ((end.state(), gradients) for end, gradients in log)
        entries = ((end["options"], gradients.state()) for end, gradients in ends if not end["skipped"])
        return replay(self._kind, base.state(), entries, self.device())

    def end_of(self, world: int, rank: int, state: State) -> dict[str, Any]:
        """Return options, buffers and random state of a rank at ``state``. CopyError: they are not kept."""
        with self._lock:
            end = self._kept(world, rank, state).ends[state]
        found: dict[str, Any] = end.state()
        return found

    def names_of(self, world: int, rank: int, state: State) -> list[list[str]]:
        """Return the names of the parameters of each slice. CopyError: it cannot be rebuilt."""
        with self._lock:
            return self._kept(world, rank, state).names

    def boxes_of(self, world: int, rank: int) -> Boxes:
        """Return the boxes of the shard of a rank. CopyError: it is not kept."""
        with self._lock:
            if (world, rank) not in self._ranks:
                raise CopyError(f"no copy of rank {rank} of world {world} is kept here")
            return self._ranks[world, rank].boxes

    def _kept(self, world: int, rank: int, state: State) -> KeptRank:
        kept = self._ranks.get((world, rank))
        if kept is None or state not in kept.ledger.states():
            raise CopyError(f"no copy of rank {rank} of world {world} at step {state.step} is kept here")
        return kept
