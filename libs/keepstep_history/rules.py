"""What must hold of every run, by name, and how a violation of it is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from keepstep_history.records import Place

KEPT_PER_RULE = 20
"""One fault of a lighthouse can break a rule for every step that follows."""


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    holds: str
    meaning: str
    """What it means that it did not hold."""


_LOST_STORE = (
    "two lighthouses led at once, or the store forgot what it held (memory:// does, and so does a restored backup)"
)

RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "one_membership",
            "a quorum_id stands for one list of members, at every lighthouse and every group",
            "groups took each other for members that were not, so gradients were averaged over different groups: "
            + _LOST_STORE,
        ),
        Rule("one_owner", "an epoch is the term of one lighthouse", _LOST_STORE),
        Rule(
            "epoch_order",
            "epochs never fall within the log of one lighthouse or one process",
            "somebody went on under a leader that had been replaced: " + _LOST_STORE,
        ),
        Rule(
            "quorum_order",
            "quorum_ids never fall within the log of one lighthouse or one process",
            "numbers were given twice, so a group may have taken an old quorum for a new one: " + _LOST_STORE,
        ),
        Rule(
            "old_epoch",
            "nobody makes, answers or orders under an epoch once a later one has made that quorum or one before",
            "a lighthouse that had been replaced still decided, and groups may have listened to it",
        ),
        Rule(
            "one_quorum",
            "a step is committed under one quorum; by a later one again if nobody in that has it, or after a resume",
            "work that a live group had committed was thrown away, or done twice on top of itself",
        ),
        Rule(
            "one_answer",
            "all who commit a step of a quorum count the same participants, at most its members, under one leader",
            "the average was divided by different numbers in different groups: their weights differ",
        ),
        Rule(
            "one_state",
            "all who commit a step of a quorum start from the same state, which each had committed or healed to",
            "groups with different weights trained on together: their weights differ for ever",
        ),
        Rule(
            "step_order",
            "the committed steps of a process grow by one, unless it healed or loaded a checkpoint",
            "a step was left out or counted twice: its weights are not those of the step that it says",
        ),
        Rule(
            "member",
            "a group acts only in quorums that it is a member of",
            "a group applied an average that it had no part in",
        ),
        Rule(
            "evicted",
            "an evicted incarnation is in no later quorum and commits nothing under one",
            "an operator's order was forgotten or ignored",
        ),
        Rule(
            "gap",
            "no line is missing in the middle of a log",
            "lines were removed, or could not be written (a full disk); what they held is not checked",
        ),
        Rule(
            "unreadable",
            "every line but one that a kill cut off is a record",
            "the file was changed or damaged, or is from another version; what the line held is not checked",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    job: str
    """Empty when it concerns no one job."""
    what: str
    records: tuple[Place, ...]
    """The lines that prove it."""

    def json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "job": self.job,
            "what": self.what,
            "meaning": RULES[self.rule].meaning,
            "records": [str(place) for place in self.records],
        }


class Violations:
    """The first of each rule in ``kept``, the number of all in ``counts``."""

    def __init__(self) -> None:
        self.kept: list[Violation] = []
        self.counts: Counter[str] = Counter()

    def add(self, rule: str, job: str, what: str, *records: Place) -> None:
        self.counts[rule] += 1
        if self.counts[rule] <= KEPT_PER_RULE:
            self.kept.append(Violation(RULES[rule].name, job, what, records))
