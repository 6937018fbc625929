"""Find ranks whose interpreter is locked: a thread never lets go of it, so no code inside can end the process.

Turns are counted, not time: a rank that was stopped, or that slept with its machine, gets the rest of its limit. A rank
without a Manager, and one that is a wrapper such as a shell script, shows no sign of life and is never found.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep_mesh.threads.dumped_stacks import sign_of_life

LOCKED_SECONDS = 60.0
TURNS = 30
"""Turns without a sign of life after which a rank is silent."""


class SilentRanks:
    """Process ids of ranks, with the last sign of life of each, and the number of turns since then."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def turn(self, pids: Iterable[int]) -> list[int]:
        """Look at all ranks that run. Return those that have just become silent."""
        self._seen = {pid: self._looked_at(pid) for pid in pids}
        return [pid for pid, (_, turns) in self._seen.items() if turns == TURNS]

    def _looked_at(self, pid: int) -> tuple[int, int]:
        sign, (last, turns) = sign_of_life(pid), self._seen.get(pid, (0, 0))
        return sign, turns + 1 if sign and sign == last else 0
