"""Decide which rank of a job with one copy dies next, and compare its shards with those of an undisturbed job. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_READY = re.compile(r"\S+ is ready")
_STEP = re.compile(r"rank (\d+) of (\d+) step (\d+) loss \S+")
_SHARD = re.compile(r"rank (\d+) of (\d+) step (\d+) shard (\w+)")


@dataclass(slots=True)
class Run:
    """The output of the trainers of one job, over all their incarnations."""

    ranks: int
    """Number of ranks that train."""
    step: int = 0
    """Last step that a rank has told."""
    names: dict[int, str] = field(default_factory=dict)
    """Member of each rank, as it told last."""
    standing_by: set[str] = field(default_factory=set)
    """Members that are ready, and have told no step yet."""
    shards: dict[int, str] = field(default_factory=dict)
    """Digest of the shard of each rank at the end."""
    end: int = 0
    """Step of these shards."""
    kills: list[tuple[str, int, int]] = field(default_factory=list)
    """Members that were killed, with their rank and the last step told."""
    shrunk: bool = False
    """Whether fewer ranks have committed a step."""

    def heard(self, member: str, line: str) -> None:
        """Process one line of a trainer."""
        if _READY.fullmatch(line):
            self.standing_by.add(member)
        elif match := _STEP.fullmatch(line):
            rank, ranks, step = (int(one) for one in match.groups())
            self.standing_by.discard(member)
            self.names[rank], self.step = member, max(self.step, step)
            self.shrunk |= ranks < self.ranks
        elif match := _SHARD.fullmatch(line):
            self.shards[int(match[1])], self.end = match[4], int(match[3])

    def next_kill(self, every: int, most: int) -> str | None:
        """Return the member to kill now; None: none.

        Ranks die one after the other, ``every`` steps apart, when a spare stands by.

        Args:
            every: number of steps.
            most: number of kills in all.
        """
        number = len(self.kills)
        rank = number % self.ranks
        if number == most or self.step < every * (number + 1) or len(self.names) < self.ranks or not self.standing_by:
            return None
        if self.names[rank] in self.standing_by:  # started again, and not heard of in its new place yet
            return None
        return self.names[rank]

    def killed(self, member: str) -> None:
        """Note that a member was killed."""
        rank = next(one for one, name in self.names.items() if name == member)
        self.kills.append((member, rank, self.step))
        del self.names[rank]


def summary(undisturbed: Run, killed: Run, *, kills: int) -> dict[str, Any]:
    """Return the content of the summary file.

    Args:
        undisturbed: the job without a kill.
        killed: the job whose ranks were killed.
        kills: number of kills that were wanted.
    """
    differing = sorted(
        rank for rank in range(killed.ranks) if undisturbed.shards.get(rank) != killed.shards.get(rank)
    )
    complete = len(undisturbed.shards) == len(killed.shards) == killed.ranks and undisturbed.end == killed.end
    return {
        "ranks": killed.ranks,
        "steps": killed.end,
        "kills": [{"member": name, "rank": rank, "step": step} for name, rank, step in killed.kills],
        "ranks_with_other_shards": differing,
        "shards_bit_identical": complete and not differing,
        "succeeded": complete and not differing and len(killed.kills) == kills and not killed.shrunk,
    }
