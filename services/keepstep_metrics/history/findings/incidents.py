"""Fold the events of a job into incidents: one line for a death and the return after it. Pure.

The events of one group belong together from its loss, or its arrival, until it trains again. A quorum belongs to the
incidents of the groups that it adds or drops. All other events stand alone: those about the job, and those about a
healthy group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep_mesh.protocol.names import name_of
from keepstep_metrics.history.events import Event, is_loss

ENDS = ("lost", "left", "moved", "evicted")
"""The group is away."""
BEGINS = ("suspect", "drain", "joined", "heal_began", "parted", *ENDS)
"""Events that begin an incident, unless the group has an open one."""
HEALS = ("heal_began", "healed", "heal_failed", "heal_given_up")
FAILED_HEALS = ("heal_failed", "heal_given_up")
PARTS = (*HEALS, "readmitted", "let_in", "incident")
"""Events that continue an open incident of the group; without one, they stand alone."""
REPEATED = "replicas_verified"
"""Event of every comparison that finds no difference: those in a row are one line."""
RANKS = {
    kind: rank
    for rank, kind in enumerate(
        (
            "quorum",
            "round_broken",
            "suspect",
            "heal_began",
            "joined",
            "moved",
            "left",
            "let_in",
            "readmitted",
            "drain",
            "healed",
            *FAILED_HEALS,
            "incident",
            "parted",
        )
    )
}
"""Events by how little they say; ``evicted`` and losses say more than these."""
AFTERMATH_SECONDS = 10.0
"""A round that breaks so soon after a loss broke because of it."""
QUIET_SECONDS = 60.0
"""An incident of a group that is back is over when nothing happened to the group for this time."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Events that belong together; times in Unix seconds."""

    id: int
    """Of the first event."""
    t: float
    until: float
    """Time of the last event."""
    kind: str
    """Kind of the event that says most."""
    name: str
    """Stable name of the group; empty: the incident is about the job."""
    sentence: str
    away: bool
    """The group was lost and has not come back."""
    events: tuple[Event, ...]


class _Incident:
    def __init__(self, name: str, event: Event) -> None:
        self.name = name
        self.events = [event]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def away(self) -> bool:
        """Whether the group has ended and has not joined since."""
        return next((one.event in ENDS for one in reversed(self.events) if one.event in (*ENDS, "joined")), False)

    def is_fresh(self, event: Event) -> bool:
        """Whether the group was lost shortly before ``event``."""
        return self.away and event.t - self.last.t < AFTERMATH_SECONDS

    def is_over(self, event: Event) -> bool:
        """Return whether ``event`` of the same group does not belong here any more."""
        if self.away or self.last.event in ("suspect", "drain"):
            return False
        if self.last.event == "healed" or event.t - self.last.t > QUIET_SECONDS:
            return True
        parted_again = event.event == "parted" and any(one.event == "parted" for one in self.events)
        return event.event not in PARTS and self.last.event == "quorum" and not parted_again


def fold(events: Iterable[Event]) -> list[Incident]:
    """Return the incidents, the oldest first. ``events``: in the order of their numbers."""
    found: list[_Incident] = []
    latest: dict[str, _Incident] = {}
    """By stable name."""
    members: set[str] = set()
    """replica_ids of the last quorum."""

    def add(name: str, event: Event) -> _Incident:
        found.append(_Incident(name, event))
        return found[-1]

    for event in events:
        known = latest.get(event.name) if event.name else None
        if event.event == "quorum":
            now = _replica_ids(event)
            changed = {name_of(one) for one in now ^ members}
            touched = [one for name, one in latest.items() if name in changed and one.last.event != "healed"]
            for one in touched or [add("", event)]:
                if one.last is not event:
                    one.events.append(event)
            members = now
        elif event.event == "round_broken" and (away := [one for one in latest.values() if one.is_fresh(event)]):
            away[-1].events.append(event)
        elif event.event == REPEATED and found and found[-1].last.event == REPEATED:
            found[-1].events.append(event)
        elif event.event not in (*BEGINS, *PARTS) or not event.name:
            add(event.name, event)
        elif known is not None and not known.is_over(event):
            known.events.append(event)
        else:
            before = found.pop().events if event.event in ENDS and _broke_just_before(found, event) else []
            one = add(event.name, event)
            one.events = [*before, event]
            if event.event in BEGINS:
                latest[event.name] = one
    return [_folded(one) for one in found]


def _broke_just_before(found: list[_Incident], event: Event) -> bool:
    """Whether the last incident is a round that broke because of the loss that ``event`` reports."""
    return (
        bool(found)
        and len(found[-1].events) == 1
        and found[-1].last.event == "round_broken"
        and event.t - found[-1].last.t < AFTERMATH_SECONDS
    )


def members_of(event: Event) -> set[str]:
    """Return the stable names of the members of the quorum that ``event`` reports."""
    return {name_of(one) for one in _replica_ids(event)}


def _replica_ids(event: Event) -> set[str]:
    members = event.detail.get("members")
    return {str(one) for one in members} if isinstance(members, list) else set()


def _folded(one: _Incident) -> Incident:
    first, chief = one.events[0], max(one.events, key=_rank)
    after = [event for event in one.events if event is not chief and event.id > chief.id]
    sentence = "; ".join((chief.sentence, *_what_followed(one.name, chief, after)))
    return Incident(first.id, first.t, one.last.t, chief.event, one.name, sentence, one.away, tuple(one.events))


def _rank(event: Event) -> int:
    return len(RANKS) if is_loss(event.event, event.detail) else RANKS.get(event.event, len(RANKS))


def _what_followed(name: str, chief: Event, events: list[Event]) -> Iterable[str]:
    """Return one text for each kind of event, in the order of the last event of each kind."""
    texts: dict[str, str] = {}
    counts: dict[str, int] = {}
    for event in events:
        kind = "in" if event.event == "quorum" and name in members_of(event) else event.event
        counts[kind] = counts.get(kind, 0) + 1
        after, times = f"after {_shown(event.t - chief.t)}", f" {counts[kind]} times" if counts[kind] > 1 else ""
        text = {
            "quorum": f"next quorum {after}",
            "joined": f"connected again {after}",
            "in": f"in the quorum {after}",
            "healed": event.sentence.removeprefix(f"{name} "),
            "suspect": "",
            "round_broken": "",
            "heal_began": "",
        }.get(kind)
        if kind in FAILED_HEALS:
            text = f"heal failed{times}: {event.detail.get('reason') or 'it took too long'}"
        elif kind == chief.event:
            text = f"{kind.replace('_', ' ')} again{times}"
        texts.pop(kind, None)
        texts[kind] = event.sentence if text is None else text
    return filter(None, texts.values())


def _shown(seconds: float) -> str:
    if seconds < 60:
        return f"{max(seconds, 0):.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
