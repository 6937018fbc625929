"""Whose turn it is in a script with several optimizers, such as those of a GAN, as the groups compare it. Pure.

The optimizer that begins a step decides what is reduced in it. In the usual loop the place in the loop decides it, so a
group that starts later begins with another optimizer than the others, or has begun fewer steps with it in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

NO_TURN = "-"
"""Turn of a step that the script began without an optimizer. It fits all others."""
LONGEST = 32
"""Steps in a row that a group counts. A group that starts later leaves out at most as many."""


class Turns:
    """The turns of one process."""

    def __init__(self) -> None:
        self._optimizer = ""
        self._run = 0
        """Number of steps in a row that it has begun."""
        self._counts = False
        """Whether the place in the run matters: a run so short has ended."""

    def begin(self, optimizer: str) -> str:
        """Begin a step with an optimizer, which is named alike in all groups. Return its turn."""
        if optimizer == self._optimizer:
            self._run += 1
        else:
            self._counts = 0 < self._run <= LONGEST
            self._optimizer, self._run = optimizer, 1
        self._counts &= self._run <= LONGEST
        return f"{self._run} {int(self._counts)} {optimizer}"


def out_of_turn(turns: Sequence[str], cohort: Sequence[int]) -> list[int]:
    """Return the ranks whose turn is another one than that of the ``cohort``.

    Args:
        turns: of each rank.
        cohort: ranks that hold the state of the job; those of their turns that are known agree, or the first counts.
    """
    known = {rank: turn.split(" ", 2) for rank, turn in enumerate(turns) if turn != NO_TURN}
    references = [known[rank] for rank in cohort if rank in known]
    if not references:
        return []
    run, _, optimizer = references[0]
    counts = any(one[1] == "1" for one in references)
    return [rank for rank, one in known.items() if one[2] != optimizer or (counts and one[0] != run)]


def described(turn: str) -> str:
    """Return the turn as a phrase."""
    if turn == NO_TURN:
        return "start_quorum()"
    run, _, optimizer = turn.split(" ", 2)
    return f"the optimizer of {optimizer}, {run} in a row"
