"""Find the ranks that hold up a job, from the stacks of the ranks whose step takes too long. Pure.

* A rank that waits for others, in code of keepstep or of torch.distributed, holds up no other rank. If all ranks of a
  round wait, those hold them up that have begun fewer collectives of it: they have not entered one. If all have begun
  equally many, those of a group that waits within itself are compared in the same way. If these are equal too, groups
  that are not late have left out a collective, which the number of collectives of the step will tell
  (``EXIT_COLLECTIVES_DIFFER``): the ranks in it are named.
* Of several ranks of a round that do not wait, those hold up the others that are behind: a rank that has begun more
  collectives waits for them in code of its own, or of torch.
* If a rank of each group of the job stands in one line, the cause is outside of the groups, such as a file system:
  no group is ended. Neither is a group without others to go on with.
* A rank in a section that it has declared, before and in its first steps, in a checkpoint, or in a compilation has a
  limit of its own.
* Time in which a rank waited for others is not its own.
* A rank whose stack, or whose count of work, changes from one answer to the next works, perhaps for ever, and has ten
  times the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep_mesh.protocol.stack_messages import RankStacks

GROUPS, RANKS = "groups", "ranks"
OWN_LIMIT = ("checkpoint", "compilation")
"""Values of ``RankStacks.waits``."""
MOVING_FACTOR = 10.0
"""Factor of the limit of a rank whose stack changes."""
SLOW_FACTOR = 30.0
"""Factor of the limit before the end of the first steps, and of a rank in a checkpoint or a compilation."""
NEEDED_ANSWERS = 4
"""Number of equal stacks in a row of a rank that hangs."""
NEEDED_SPREAD = 3 / 8
"""Part of the limit since the first of them. An operator who asks too makes more answers, but no more time."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A rank of a group that works, as its last answers show it."""

    replica_id: str
    seconds: float
    """Since its group began to work."""
    acted: float
    """The same, but only since its answers last showed that it waited for others, if they did."""
    found: RankStacks
    answers: int
    """Answers in a row with the same stack of the training thread."""
    same_for: float
    """Seconds since the first of them."""
    total: int
    """Answers since its group is late."""
    learned: bool
    """Whether its group has taken some steps."""
    round: tuple[int, int] | None
    """Quorum and step in which its group works; None: this lighthouse has given it no answer, or it asked since."""

    @property
    def who(self) -> str:
        return f"{self.replica_id} rank {self.found.rank}"

    @property
    def sentence(self) -> str:
        found = self.found
        if found.section:
            return (
                f"{self.who} is in the section {found.section!r} for {found.section_ms / 1000:.0f} s of "
                f"{found.section_limit_ms / 1000:.0f} s"
            )
        where = found.line or "code without a line of the script"
        if found.in_flight and found.waits:
            return f"{self.who} waits for other groups in {where} for {self.seconds:.0f} s: {found.in_flight}"
        return f"{self.who} waits in {where} for {self.seconds:.0f} s"

    def limit(self, limit: float) -> float:
        """Return the seconds after which this rank hangs, outside of sections. ``limit``: of the job."""
        stands = self.answers >= NEEDED_ANSWERS and self.same_for >= NEEDED_SPREAD * limit
        own = not self.learned or self.found.waits in OWN_LIMIT
        return limit * (SLOW_FACTOR if own else 1.0) * (1.0 if stands else MOVING_FACTOR)

    def hangs(self, limit: float) -> bool:
        """Return whether it has used up its limit."""
        if self.found.section:
            return self.found.section_ms > self.found.section_limit_ms
        return self.total >= NEEDED_ANSWERS and self.acted >= self.limit(limit)


@dataclass(frozen=True, slots=True)
class Verdict:
    suspects: tuple[Standing, ...] = ()
    """Ranks that hold up the job; those that hang are among them."""
    hang: tuple[Standing, ...] = ()
    """Ranks that hold it up and have used up their limit."""
    spared: str = ""
    """Why no group of ``hang`` is ended; empty: they are."""
    left_alone: tuple[Standing, ...] = ()
    """Without suspects: ranks in a collective for which no late rank is missing."""


NOTHING = Verdict()


def waits_for_others(found: RankStacks) -> bool:
    """Return whether a rank waits for other groups, or for other ranks of its group."""
    return found.waits in (GROUPS, RANKS)


def judge(standings: Sequence[Standing], others: int, limit: float) -> Verdict:
    """Return who holds up the job.

    Args:
        standings: the ranks of the groups whose step takes long.
        others: number of groups of the job that wait for a quorum, or whose step does not take long.
        limit: of the job, seconds.
    """
    suspects = _suspects(standings)
    if not suspects:
        return Verdict(left_alone=tuple(one for one in standings if one.found.in_flight))
    hang = tuple(one for one in suspects if one.hangs(limit))
    if not hang:
        return Verdict(suspects)
    groups = {one.replica_id for one in standings}
    ended = {one.replica_id for one in hang}
    if others or ended < groups:
        return Verdict(suspects, hang)
    lines = {one.found.line for one in hang}
    if len(groups) == 1:
        return Verdict(suspects, hang, "no other group could go on without it")
    if len(lines) == 1:
        return Verdict(suspects, hang, f"all groups stand in one line, {min(lines)}: the cause is outside of them")
    return Verdict(suspects, hang, "all groups hang, and none could go on without the others")


def _suspects(standings: Sequence[Standing]) -> tuple[Standing, ...]:
    """Return the ranks that hold up the others."""
    found: tuple[Standing, ...] = ()
    for round_ in dict.fromkeys(one.round for one in standings):
        here = [one for one in standings if one.round == round_]
        acting = tuple(one for one in here if not waits_for_others(one.found))
        if round_ is None:
            found += acting
        else:
            found += (_behind(acting) or acting) if acting else _behind(here)
    return found


def _behind(standings: Sequence[Standing]) -> tuple[Standing, ...]:
    """Return the ranks of one round that have begun the fewest collectives; empty: all have begun equally many.

    The ranks of a group may have different parts of a model, such as stages of a pipeline. So each is compared with the
    same rank of other groups.
    """
    several = len({one.replica_id for one in standings}) > 1
    found: tuple[Standing, ...] = ()
    for rank in dict.fromkeys(one.found.rank if several else None for one in standings):
        alike = [one for one in standings if rank in (None, one.found.rank)]
        found += _least(alike, lambda one: one.found.collectives)
    if found:
        return found
    for replica_id in dict.fromkeys(one.replica_id for one in standings if one.found.waits == RANKS):
        ranks = [one for one in standings if one.replica_id == replica_id]  # others count from another start
        found += _least(ranks, lambda one: one.found.group_collectives)
    return found


def _least(standings: Sequence[Standing], count: Callable[[Standing], int]) -> tuple[Standing, ...]:
    """Return those with the least count; empty: all are equal."""
    least = min(map(count, standings), default=0)
    found = tuple(one for one in standings if count(one) == least)
    return found if len(found) < len(standings) else ()
