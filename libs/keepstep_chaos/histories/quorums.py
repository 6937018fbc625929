"""Collect the facts about each quorum of a job: its members, the lighthouse that formed it, its epochs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep_chaos.histories.records import EventRecord, Place
from keepstep_chaos.histories.rules import Violations
from keepstep_mesh.text import listed

MAX_NAMED = 8
"""Maximum number of groups that a sentence names; it counts the others."""


def named(groups: Iterable[str]) -> str:
    """Return ``a, b and 3 more``, sorted."""
    return listed(sorted(groups), MAX_NAMED)


@dataclass(slots=True)
class Quorum:
    members: frozenset[str] | None = None
    claimed: Place | None = None
    """The first line that lists its members."""
    made: tuple[EventRecord, Place] | None = None
    lowest: tuple[int, Place, str] | None = None
    """The lowest epoch of an action in this quorum, its line, and a sentence about it."""


class Quorums:
    """The quorums of one job, by quorum_id."""

    def __init__(self, job: str, violations: Violations) -> None:
        self.by_id: dict[int, Quorum] = {}
        self._job = job
        self._violations = violations
        self._member_sets: dict[frozenset[str], frozenset[str]] = {}

    def _quorum(self, quorum_id: int) -> Quorum:
        return self.by_id.setdefault(quorum_id, Quorum())

    def made(self, place: Place, record: EventRecord) -> None:
        """Record that a lighthouse formed the quorum."""
        assert record.quorum_id is not None
        quorum = self._quorum(record.quorum_id)
        self.claim(place, record.quorum_id, record.names, "the lighthouse")
        if quorum.made is None:
            quorum.made = record, place
        elif quorum.made[0].id != record.id:
            what = f"quorum {record.quorum_id} was made twice, under epoch {quorum.made[0].epoch} and {record.epoch}"
            self._violations.add("one_membership", self._job, what, quorum.made[1], place)

    def claim(self, place: Place, quorum_id: int, members: tuple[str, ...], who: str) -> None:
        quorum, claimed = self._quorum(quorum_id), frozenset(members)
        if quorum.members is None or quorum.claimed is None:
            quorum.members, quorum.claimed = self._member_sets.setdefault(claimed, claimed), place
        elif quorum.members != claimed:
            what = f"quorum {quorum_id} is of {named(claimed)} for {who}, and elsewhere of {named(quorum.members)}"
            self._violations.add("one_membership", self._job, what, quorum.claimed, place)

    def acted(self, place: Place, quorum_id: int, epoch: int, what: str) -> None:
        """Record an action under ``epoch`` by a process that knew this quorum."""
        quorum = self._quorum(quorum_id)
        if quorum.lowest is None or epoch < quorum.lowest[0]:
            quorum.lowest = epoch, place, what

    def check_epochs(self) -> None:
        """Check that no action with knowledge of a quorum has an epoch below that of the quorum."""
        latest: tuple[EventRecord, Place] | None = None
        for quorum_id, quorum in sorted(self.by_id.items()):
            if quorum.made is not None and (latest is None or quorum.made[0].epoch >= latest[0].epoch):
                latest = quorum.made
            if latest is None:
                continue
            (record, where), acts = latest, []
            if quorum.made is not None:
                acts.append((quorum.made[0].epoch, quorum.made[1], f"quorum {quorum_id} was made"))
            if quorum.lowest is not None:
                acts.append(quorum.lowest)
            for epoch, place, what in acts:
                if epoch < record.epoch:
                    since = f"though epoch {record.epoch} had made quorum {record.quorum_id}"
                    self._violations.add("old_epoch", self._job, f"{what} under epoch {epoch}, {since}", where, place)
