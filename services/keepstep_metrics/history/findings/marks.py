"""Events that charts mark. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep_metrics.history.events import Event, is_loss

KINDS = {
    "evicted": "failure",
    "heal_failed": "failure",
    "heal_given_up": "failure",
    "parted": "failure",
    "replicas_differ": "failure",
    "replica_diverged": "failure",
    "shards_lost": "went_back",
    "went_back": "went_back",
    "nonfinite": "nonfinite",
    "healed": "heal",
    "quorum": "quorum",
}
"""Kind of an event -> kind of its mark. The loss of a group is a failure too."""
ORDER = ("went_back", "nonfinite", "failure", "heal", "quorum")
"""The most important first."""


@dataclass(frozen=True, slots=True)
class Mark:
    t: float
    """Unix time."""
    kind: str
    """``failure``, ``heal``, ``quorum``, ``went_back`` or ``nonfinite``."""
    sentence: str
    count: int = 1
    """Marks of this kind at this place of the chart."""


def marks(events: Iterable[Event], since: float, until: float, width: float) -> list[Mark]:
    """Return the marks between two times, the oldest first; of marks within ``width`` seconds, the most important."""
    found: list[Mark] = []
    for event in events:
        kind = "failure" if is_loss(event.event, event.detail) else KINDS.get(event.event)
        if kind is None or not since <= event.t < until:
            continue
        mark = Mark(event.t, kind, event.sentence)
        last = found[-1] if found else None
        if last is None or mark.t - last.t >= width:
            found.append(mark)
        elif kind == last.kind:
            found[-1] = Mark(last.t, kind, last.sentence, last.count + 1)
        elif ORDER.index(kind) < ORDER.index(last.kind):
            found[-1] = mark
    return found
