"""Decide which rank of a job with one copy dies next, tell its story, and compare its shards. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_READY = re.compile(r"\S+ is ready")
_STEP = re.compile(r"rank (\d+) of (\d+) step (\d+) loss \S+")
_SHARD = re.compile(r"rank (\d+) of (\d+) step (\d+) shard (\w+)")
TOLD_EVERY = 100
"""Number of steps between two lines of progress."""


@dataclass
class Kill:
    """A kill of a member, and the first step of the member that took its place."""

    member: str
    rank: int
    step: int
    """Last step of the job that a rank had told before."""
    at: float
    place_taken_by: str = ""
    seconds: float | None = None
    """From the kill to the first commit of the rank in another process."""


@dataclass
class Run:
    """The output of the trainers of one job, over all their starts. Times are seconds of any clock."""

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
    kills: list[Kill] = field(default_factory=list)
    resized: bool = False
    """Whether another number of ranks has committed a step."""
    happenings: list[str] = field(default_factory=list)
    """Sentences for a person who watches."""

    def heard(self, member: str, line: str, now: float) -> None:
        """Process one line of a trainer."""
        if _READY.fullmatch(line):
            self.standing_by.add(member)
            if any(one.member == member for one in self.kills):
                self.happenings.append(f"{member} has started again, and stands by")
        elif match := _STEP.fullmatch(line):
            rank, ranks, step = (int(one) for one in match.groups())
            self.standing_by.discard(member)
            self.resized |= ranks != self.ranks
            for kill in self.kills:
                if kill.rank == rank and not kill.place_taken_by and member != kill.member:
                    kill.place_taken_by, kill.seconds = member, now - kill.at
                    self.happenings.append(
                        f"{member} has committed step {step} as rank {rank}, {kill.seconds:.2f} s after the kill"
                    )
            if step // TOLD_EVERY > self.step // TOLD_EVERY:
                self.happenings.append(f"step {step} of {ranks} ranks")
            self.names[rank], self.step = member, max(self.step, step)
        elif match := _SHARD.fullmatch(line):
            self.shards[int(match[1])], self.end = match[4], int(match[3])

    def next_kill(self, every: int, most: int) -> str | None:
        """Return the member to kill now; None: none.

        Ranks die one after the other, at least ``every`` steps apart, when a spare stands by.

        Args:
            every: number of steps.
            most: number of kills in all.
        """
        if len(self.kills) == most or not self._settled(every):
            return None
        return self.names[len(self.kills) % self.ranks]

    def over(self, every: int, most: int) -> bool:
        """Return whether all kills are survived, and a spare stands by again."""
        return len(self.kills) == most and self._settled(every)

    def _settled(self, every: int) -> bool:
        last = self.kills[-1] if self.kills else None
        return (
            (last is None or bool(last.place_taken_by))
            and self.step >= (last.step if last else 0) + every
            and len(self.names) == self.ranks
            and bool(self.standing_by - set(self.names.values()))
        )

    def killed(self, member: str, now: float) -> None:
        """Note that a member was killed."""
        rank = next(one for one, name in self.names.items() if name == member)
        self.kills.append(Kill(member, rank, self.step, now))
        del self.names[rank]
        self.happenings.append(f"SIGKILL to {member}, which is rank {rank}, after step {self.step}")


def summary(undisturbed: Run, killed: Run, *, kills: int) -> dict[str, Any]:
    """Return the content of the summary file.

    Args:
        undisturbed: the job without a kill.
        killed: the job whose ranks were killed.
        kills: number of kills that were wanted.
    """
    differing = sorted(rank for rank in range(killed.ranks) if undisturbed.shards.get(rank) != killed.shards.get(rank))
    complete = len(undisturbed.shards) == len(killed.shards) == killed.ranks and undisturbed.end == killed.end
    survived = [one for one in killed.kills if one.place_taken_by]
    return {
        "ranks": killed.ranks,
        "steps": killed.end,
        "kills": kills,
        "kills_survived": len(survived),
        "each_kill": [
            {
                "member": one.member,
                "rank": one.rank,
                "step": one.step,
                "place_taken_by": one.place_taken_by,
                "seconds_to_commit": None if one.seconds is None else round(one.seconds, 3),
            }
            for one in killed.kills
        ],
        "ranks_with_other_shards": differing,
        "shards_bit_identical": complete and not differing,
        "succeeded": complete
        and not differing
        and len(survived) == kills
        and not (killed.resized or undisturbed.resized),
    }
