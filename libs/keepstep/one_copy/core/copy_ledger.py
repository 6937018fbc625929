"""Which states of a rank its keeper can rebuild. Pure: it knows what has arrived, and has no bytes.

The parameters of a rank are cut into *slices*. A slice has a *base*, its state after some step, and a *log*, the
gradients of the steps since. A new base of a slice replaces the steps of its log up to it. Each step brings the log of
all slices and the bases of some of them, so that memory and traffic are even.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.one_copy.core.holding import Copy, State

SLICES = 12
"""Number of slices of a rank. While a base replaces another one, a keeper has both."""
MEMORY = 2.18
"""Bytes of a copy at their highest, by those of the state."""


def steps_of_round(state_bytes: int, gradient_bytes: int, slices: int, largest_bytes: int) -> int:
    """Return after how many steps a slice gets a new base: 5 for Adam in one dtype.

    Before the next base arrives, the logs of the slices have from one step to all of a round; that of the largest may
    have all. So many steps that the bases, the logs, and this base together have ``MEMORY`` times the bytes of the
    state; but at least one, and at most as many as slices.

    Args:
        state_bytes: of the parameters and their optimizer state.
        gradient_bytes: of all gradients.
        slices: into which the state is cut; at least 1.
        largest_bytes: of the largest slice.
    """
    if not gradient_bytes:
        return 1
    steps_of_logs = ((MEMORY - 1) * state_bytes - largest_bytes) / gradient_bytes
    uneven = largest_bytes / state_bytes - 1 / slices
    return max(1, min(slices, int((2 * steps_of_logs - 1 + uneven) / (1 + uneven))))


def cut(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Cut a list of parameters into at most ``count`` slices of neighbours, of about equal bytes.

    Args:
        sizes: bytes of each parameter.
        count: at least 1.

    Returns:
        The indices of each slice. None is empty.
    """
    total, done = sum(sizes), 0
    slices: list[list[int]] = [[] for _ in range(count)]
    for index, size in enumerate(sizes):
        middle = done + size / 2
        slices[min(count - 1, int(middle * count / total)) if total else 0].append(index)
        done += size
    return tuple(tuple(one) for one in slices if one)


class CopyLedger:
    """The parts of the copy of one rank that a keeper has.

    Args:
        world: number of the world of the rank.
        rank: in that world.
        slices: number of slices.
    """

    def __init__(self, world: int, rank: int, slices: int) -> None:
        self.world = world
        self.rank = rank
        self._bases: list[State | None] = [None] * slices
        self._logs: list[list[State]] = [[] for _ in range(slices)]
        self._ends: list[State] = []
        """States whose step has arrived as a whole, with the state of the rank that is in no slice."""

    @property
    def complete(self) -> bool:
        """Whether all slices have a base."""
        return all(base is not None for base in self._bases)

    @property
    def committed(self) -> State | None:
        """The newest state that is known as committed: bases are sent of committed states only."""
        return max((base for base in self._bases if base is not None), key=lambda one: one.step, default=None)

    @property
    def oldest(self) -> int:
        """Number of the slice whose base is the oldest."""
        steps = [-1 if base is None else base.step for base in self._bases]
        return steps.index(min(steps)) if steps else 0

    def add_base(self, number: int, state: State) -> list[State]:
        """Note a base of a slice. Return the steps of its log that it replaces."""
        self._bases[number] = state
        log = self._logs[number]
        replaced = [one for one in log if one.step <= state.step]
        self._logs[number] = [one for one in log if one.step > state.step]
        return replaced

    def add_gradients(self, number: int, state: State) -> list[State]:
        """Note the gradients of a slice that lead to ``state``. Return the steps that they replace.

        Gradients of the same or a later step are those of attempts that were dropped.
        """
        log = self._logs[number]
        replaced = [one for one in log if one.step >= state.step]
        self._logs[number] = [*(one for one in log if one.step < state.step), state]
        return replaced

    def end_step(self, state: State) -> list[State]:
        """Note that all of ``state`` has arrived. Return the ends that are not needed any more.

        An end is needed from the oldest base on, because a replay of its slice needs the options of each step.
        """
        oldest = min((base.step for base in self._bases if base is not None), default=0)
        kept = [one for one in self._ends if oldest <= one.step < state.step]
        dropped = [one for one in self._ends if one not in kept]
        self._ends = [*kept, state]
        return dropped

    def states(self) -> tuple[State, ...]:
        """Return the states that can be rebuilt, oldest first."""
        newest = self.committed
        if newest is None or not self.complete:
            return ()
        return tuple(end for end in self._ends if end.step >= newest.step and self._reaches(end))

    def _reaches(self, state: State) -> bool:
        """Return whether the base and the log of each slice lead to ``state``."""
        for base, log in zip(self._bases, self._logs, strict=True):
            if base is None or base.step > state.step:
                return False
            reached = base
            for one in log:
                if one.step > state.step:
                    break
                if one.step != reached.step + 1:
                    return False
                reached = one
            if reached != state:
                return False
        return True

    def steps_to(self, number: int, state: State) -> tuple[State | None, list[State]]:
        """Return the base of a slice, and the steps of its log that lead from there to ``state``."""
        return self._bases[number], [one for one in self._logs[number] if one.step <= state.step]

    def copy(self) -> Copy:
        """Return the states that can be rebuilt, for other ranks."""
        return Copy(self.world, self.rank, self.states(), self.committed)
