"""Groups on probation: parted from the others for a time, and then on trial until they commit a step. Pure.

A parted group stays connected, and is kept out of quorums for 5 s, or for twenty times the duration of the failed round
if that is longer. Each further parting doubles this time, up to 10 minutes. A trial that fails costs the others about
two such rounds, so they keep nine tenths of their steps. Names are stable names, so that a restart does not end a
probation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

PARTED_SECONDS = 5.0
PARTED_ROUNDS = 20
MAX_PARTED_SECONDS = 600.0
MAX_REMEMBERED = 1000
"""Limit of the groups on probation, and of the names with failed heals; the oldest on trial are forgotten."""
FORGIVEN_HEALS = 1
"""Heals in a row that may fail without a consequence."""
NEVER = float("inf")

Cause = Literal["own", "cut", "heal"]


@dataclass(slots=True)
class Parted:
    """Why and for how long a group is kept out."""

    cause: Cause
    """``own``: its own steps failed; ``cut``: it and others could not reach each other; ``heal``: its heals failed."""
    reason: str
    """One sentence, for operators."""
    times: int
    """Partings in a row."""
    until: float
    """Monotonic seconds."""
    out: bool = True
    """False: on trial. It takes part again, and the next failure parts it again."""


class Partings:
    """All groups on probation, and the heals that failed. Not stored: a new leader collects the evidence again."""

    def __init__(self) -> None:
        self.groups: OrderedDict[str, Parted] = OrderedDict()
        """By stable name."""
        self.failed_heals: OrderedDict[str, int] = OrderedDict()
        """Heals in a row that did not end in a commit, by stable name."""
        self.refused = ""
        """Why groups are not parted although the evidence accuses them; empty: no such group."""

    def is_out(self, name: str) -> bool:
        """Return whether the group is kept out of quorums."""
        parted = self.groups.get(name)
        return parted is not None and parted.out

    def due(self) -> float:
        """Return when the next group is let in, monotonic seconds. O(groups on probation)."""
        return min((one.until for one in self.groups.values() if one.out), default=NEVER)

    def part(self, name: str, cause: Cause, reason: str, duration: float, now: float) -> Parted:
        """Keep a group out from now on. ``duration``: of the failed round, in seconds."""
        before = self.groups.pop(name, None)
        times = 1 if before is None else before.times + 1
        seconds = max(PARTED_SECONDS, PARTED_ROUNDS * duration) * 2.0 ** min(times - 1, 20)
        parted = self.groups[name] = Parted(cause, reason, times, now + min(seconds, MAX_PARTED_SECONDS))
        extra = max(0, len(self.groups) - MAX_REMEMBERED)
        for oldest in [one for one, other in self.groups.items() if not other.out][:extra] if extra else ():
            del self.groups[oldest]
        return parted

    def heal_failed(self, name: str) -> bool:
        """Count a heal that did not end in a commit. Return whether the group must be parted for it."""
        failed = self.failed_heals[name] = self.failed_heals.pop(name, 0) + 1
        while len(self.failed_heals) > MAX_REMEMBERED:
            self.failed_heals.popitem(last=False)
        return failed > FORGIVEN_HEALS

    def forgive(self, name: str) -> None:
        """Forget the partings and failed heals of a group: it has committed a step, or an operator says so."""
        self.groups.pop(name, None)
        self.failed_heals.pop(name, None)
