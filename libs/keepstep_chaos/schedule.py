"""Draw faults from a seed, and decide when each may begin. Pure: time and the state of the job are arguments.

The faults of a seed do not depend on the job: kind, target, and duration are drawn in advance, in one order. A fault
that the job cannot bear now waits, and up to ``LOOKAHEAD`` later ones may overtake it. The rules:

1.  At most ``at_most`` targets are down at the same time. A target that is down is not hit again.
2.  At least ``min_groups`` groups and one lighthouse stay up, and no more than ``groups_down`` groups are down. While
    a store is down no lighthouse is hit, and the other way round; of several stores a majority stays up.
3.  The next fault begins when the job has recovered, or when the drawn pause is over; with ``whole_pauses`` never
    before. Pauses are exponential: faults come as those of machines do, without a memory of the last one.

With ``beyond_limits`` the second rule does not hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target

LOOKAHEAD = 64
"""Many: groups recover slowly, and the faults that wait for them must not hold up those of other targets."""
SHORTEST_SECONDS = 0.1
"""Of faults that last."""
SHORTEST_PAUSE_SECONDS = 0.1
"""Between the beginnings of two faults, also if the job recovers at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    at_most: int = 2
    """Targets that may be down at the same time."""
    min_groups: int = 1
    beyond_limits: bool = False
    """Also take faults that leave fewer than ``min_groups`` groups, or no lighthouse."""
    mean_seconds_between: float = 10.0
    """Mean of the drawn pauses."""
    longest_seconds: float = 8.0
    """Of faults that last."""
    whole_pauses: bool = False
    """Wait for the end of a pause, also if the job has recovered."""
    groups_down: int | None = None
    """Groups that may be down at the same time: of a model that exists once the number of copies. None: no limit."""


class Bearable:
    """Which faults the job can bear, by its targets."""

    def __init__(self, targets: Collection[Target], limits: Limits) -> None:
        self._targets = targets
        self._limits = limits

    def bears(self, fault: Fault, down: Collection[Target]) -> bool:
        """Return whether ``fault`` may begin while the targets ``down`` have not recovered."""
        if fault.target in down:
            return False
        if not fault.kind.takes_away:
            return True
        if len(down) >= self._limits.at_most:
            return False
        return self._limits.beyond_limits or self._leaves_enough({*down, fault.target}, fault.target.role)

    def _leaves_enough(self, down: Collection[Target], hit: Role) -> bool:
        def count(role: Role, among: Collection[Target]) -> int:
            return sum(target.role == role for target in among)

        up = {role: count(role, self._targets) - count(role, down) for role in Role}
        match hit:
            case Role.GROUP:
                most = self._limits.groups_down
                few_down = most is None or count(Role.GROUP, down) <= most
                return few_down and up[Role.GROUP] >= self._limits.min_groups
            case Role.LIGHTHOUSE:
                return up[Role.LIGHTHOUSE] >= 1 and not count(Role.STORE, down)
            case Role.STORE:
                stores = count(Role.STORE, self._targets)
                return not count(Role.LIGHTHOUSE, down) and (stores == 1 or up[Role.STORE] > stores // 2)
            case _:
                return True


def choices(targets: Sequence[Target], kinds: Mapping[Target, Collection[str]], limits: Limits) -> list[Fault]:
    """Return one fault for each kind and target that can be drawn. ``kinds``: those that are available by target."""
    bearable = Bearable(targets, limits)
    found = [Fault(0, KINDS[name], target, 0.0) for target in targets for name in KINDS if name in kinds[target]]
    return [fault for fault in found if bearable.bears(fault, ())]


class Schedule:
    """The faults of one seed, each when the job can bear it.

    Args:
        seed: Of all draws.
        targets: All targets; their order matters.
        kinds: Names of the kinds that are available, by target.
        limits: Limits of the job.

    Raises:
        ValueError: no fault is possible within the limits.
    """

    def __init__(
        self, seed: int, targets: Sequence[Target], kinds: Mapping[Target, Collection[str]], limits: Limits
    ) -> None:
        self._limits = limits
        self._bearable = Bearable(targets, limits)
        self._choices = choices(targets, kinds, limits)
        if not self._choices:
            raise ValueError("no fault is possible within the limits: start more groups, or pass --beyond-limits")
        self._faults = self._draws(Random(seed))  # noqa: S311 - no secret depends on it
        self._pauses = Random(seed + 1)  # noqa: S311
        self._waiting = list(islice(self._faults, LOOKAHEAD))
        self._last: float | None = None
        self._pause = 0.0

    def _draws(self, random: Random) -> Iterator[Fault]:
        """Draw the kind first, so that a kind with many targets is not more frequent."""
        kinds = list(dict.fromkeys(fault.kind.name for fault in self._choices))
        weights = [KINDS[name].weight for name in kinds]
        number = 0
        while True:
            number += 1
            (name,) = random.choices(kinds, weights)
            target = random.choice([fault.target for fault in self._choices if fault.kind.name == name])
            ratio = max(1.0, self._limits.longest_seconds / SHORTEST_SECONDS)
            seconds = SHORTEST_SECONDS * ratio ** random.random()  # as many short ones as long ones
            yield Fault(number, KINDS[name], target, seconds if KINDS[name].lasts else 0.0)

    def preview(self, number: int) -> list[Fault]:
        """Return the first faults in the order of the draws, before any began."""
        while len(self._waiting) < number:
            self._waiting.append(next(self._faults))
        return self._waiting[:number]

    def next(self, now: float, down: Collection[Target]) -> Fault | None:
        """Return the fault that begins now; None: none may.

        Args:
            now: Time in seconds, of any clock that does not go back.
            down: Targets that are hit, or were hit and have not recovered.
        """
        whole = self._limits.whole_pauses
        if self._last is None and whole:
            self._pause_from(now)
        if self._last is not None and now - self._last < (self._pause if down or whole else SHORTEST_PAUSE_SECONDS):
            return None
        for place, fault in enumerate(self._waiting[:LOOKAHEAD]):
            if self._bearable.bears(fault, down):
                del self._waiting[place]
                self._waiting.append(next(self._faults))
                self._pause_from(now)
                return fault
        return None

    def _pause_from(self, now: float) -> None:
        self._last, self._pause = now, self._pauses.expovariate(1 / self._limits.mean_seconds_between)
