"""Evidence about steps that fail without the loss of a group, and the fewest groups that explain it. Pure.

A group whose step failed sends a ``StepFailure`` with its next request. The failures of one round make *accusations*:

* ``own`` accuses the group itself. If more than half of the members fail by themselves, the cause is common to all,
  such as a broken script, and accuses no group.
* ``peer`` accuses a pair, the group and one that it could not reach, if both say so, or if the group names only one.
* A group that names several, none of which names it, accuses itself: the trouble is more likely its own. A group that
  lies thus cannot part several others.
* ``unknown`` accuses no group.

An accusation is *confirmed* by a second failed round: the next one, or one so soon that failures of this kind cost more
than about a tenth of the time. A link that fails now and then therefore counts too, and a rare failure does not. Where
a model exists once, two groups that name each other are believed at once: the recovery after the failed step would need
the same link.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep_mesh.protocol.membership import MAX_PEERS, OWN, PEER, StepFailure
from keepstep_mesh.protocol.names import name_of

COST_FACTOR = 10
"""A failure is remembered for so many times the duration of the failed round."""

Accusation = frozenset[str]
"""Stable names: of one group that fails by itself, or of two that cannot reach each other."""


def accusations(failures: Mapping[str, StepFailure], members: Collection[str]) -> set[Accusation]:
    """Return the accusations that follow from the failures of one round.

    Args:
        failures: failure of each group that has one, by stable name.
        members: stable names of the quorum.
    """
    own = {name for name, failure in failures.items() if failure.cause == OWN}
    found = {frozenset((name,)) for name in own} if 2 * len(own) <= len(members) else set()
    both = mutual(failures, members)
    for name, failure in failures.items():
        peers = _named(name, failure, members)
        pairs = {frozenset((name, peer)) for peer in peers}
        if len(peers) > 1:
            pairs &= both
        found |= pairs
        if peers and not pairs:
            found.add(frozenset((name,)))
    return found


def mutual(failures: Mapping[str, StepFailure], members: Collection[str]) -> set[Accusation]:
    """Return the pairs of groups that both say that they cannot reach each other. Arguments as above."""
    named = {name: _named(name, failure, members) for name, failure in failures.items()}
    return {frozenset((name, peer)) for name, peers in named.items() for peer in peers if name in named.get(peer, ())}


def _named(name: str, failure: StepFailure, members: Collection[str]) -> frozenset[str]:
    """Return the names of the other members that the group could not reach."""
    if failure.cause != PEER:
        return frozenset()
    return frozenset(map(name_of, failure.peers[:MAX_PEERS])) & frozenset(members) - {name}


def cover(accused: Iterable[Accusation], rank: Callable[[str], Any]) -> set[str]:
    """Return a small set of names with at least one of each accusation: repeatedly the most accused group.

    Args:
        rank: of two groups that are accused equally often, the one with the higher rank is chosen.
    """
    chosen = {name for one in accused if len(one) == 1 for name in one}
    left: dict[str, set[Accusation]] = {}
    for one in accused:
        if chosen.isdisjoint(one):
            for name in one:
                left.setdefault(name, set()).add(one)
    places = {name: place for place, name in enumerate(sorted(left, key=rank, reverse=True))}
    queue = [(-len(ones), places[name], name) for name, ones in left.items()]
    heapq.heapify(queue)
    while queue:
        count, place, worst = heapq.heappop(queue)
        if len(left[worst]) != -count:  # it was accused together with a chosen one
            heapq.heappush(queue, (-len(left[worst]), place, worst))
        elif left[worst]:
            chosen.add(worst)
            for one in [*left[worst]]:
                for name in one:
                    left[name].discard(one)
    return chosen


@dataclass(slots=True)
class _Strike:
    round: int
    """Number of the last failed round with this accusation."""
    until: float
    """Until then another failed round confirms it."""
    confirmed: bool = False


class Evidence:
    """The accusations of the last failed rounds. Not stored."""

    def __init__(self) -> None:
        self._strikes: dict[Accusation, _Strike] = {}

    def add(
        self,
        found: Collection[Accusation],
        number: int,
        duration: float,
        now: float,
        trial: Collection[str],
        believed: Collection[Accusation] = (),
    ) -> set[Accusation]:
        """Add the accusations of a failed round. Return those that are confirmed now.

        Args:
            found: of this round.
            number: of the round.
            duration: of the round, in seconds.
            now: monotonic seconds.
            trial: names of groups against which one failed round is enough.
            believed: accusations for which one failed round is enough.
        """
        self._strikes = {
            one: strike
            for one, strike in self._strikes.items()
            if now <= strike.until or strike.round == number - 1 or not one.isdisjoint(trial)
        }
        for one in found:
            strike = self._strikes.setdefault(one, _Strike(number, -1.0, not one.isdisjoint(trial)))
            strike.confirmed = strike.confirmed or strike.round < number or one in believed
            strike.round, strike.until = number, now + COST_FACTOR * duration
        return {one for one in found if self._strikes[one].confirmed}

    def confirmed_against(self, names: Collection[str]) -> dict[str, set[Accusation]]:
        """Return the confirmed accusations against each of these groups."""
        found: dict[str, set[Accusation]] = {name: set() for name in names}
        for one, strike in self._strikes.items() if names else ():
            if strike.confirmed:
                for name in one & found.keys():
                    found[name].add(one)
        return found

    def forgive(self, name: str, trial: Collection[str]) -> None:
        """Drop the accusations against a group, except those that concern a group on trial too."""
        self._strikes = {
            one: strike for one, strike in self._strikes.items() if name not in one or not one.isdisjoint(trial)
        }
