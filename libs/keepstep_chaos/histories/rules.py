"""The invariants of every run, by name, and the record of a violation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from keepstep_chaos.histories.records import Place

KEPT_PER_RULE = 20
"""Maximum number of stored violations per rule: one fault can violate a rule in every later step."""


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    holds: str
    meaning: str
    """Consequence of a violation."""
    needs: str = ""
    """Kind of log without which the rule cannot be checked: ``event log``, ``step log``; empty: either will do."""


_LOST_STORE = "two lighthouses led at once, or the store lost data (as memory:// and a restored backup do)"

RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "one_membership",
            "a quorum_id stands for one list of members, at every lighthouse and every group",
            "groups had different lists of members, so gradients were averaged over different groups: " + _LOST_STORE,
        ),
        Rule("one_owner", "an epoch is the term of one lighthouse", _LOST_STORE, "event log"),
        Rule(
            "epoch_order",
            "epochs never fall within the log of one lighthouse or one process",
            "a process went on under a replaced leader: " + _LOST_STORE,
        ),
        Rule(
            "quorum_order",
            "quorum_ids never fall within the log of one lighthouse or one process",
            "numbers were issued twice, so a group may have mistaken an old quorum for a new one: " + _LOST_STORE,
        ),
        Rule(
            "old_epoch",
            "no lighthouse acts on a quorum under an epoch below the one that formed it or an earlier quorum",
            "a replaced lighthouse still decided, and groups may have followed it",
            "event log",
        ),
        Rule(
            "one_quorum",
            "a step commits under one quorum; under a later one again if no member has it, or after a resume",
            "committed work of a live group was lost, or applied twice",
            "step log",
        ),
        Rule(
            "one_answer",
            "all groups that commit a step of a quorum count the same participants, under one leader",
            "groups divided the average by different numbers: their weights differ",
            "step log",
        ),
        Rule(
            "one_state",
            "all groups that commit a step of a quorum start from one state, which each had committed or healed to",
            "groups with different weights trained together: their weights stay different",
            "step log",
        ),
        Rule(
            "one_end",
            "all groups that finish together do so at one state",
            "groups ended with different weights",
            "step log",
        ),
        Rule(
            "step_order",
            "the committed steps of a process grow by one, unless it healed or loaded a checkpoint",
            "a step was skipped or counted twice: the weights are not those of the reported step",
            "step log",
        ),
        Rule(
            "member",
            "a group acts only in quorums that contain it",
            "a group applied an average that it did not contribute to",
            "step log",
        ),
        Rule(
            "evicted",
            "an evicted incarnation is in no later quorum and commits nothing under one",
            "an operator's order was lost or ignored",
            "event log",
        ),
        Rule(
            "gap",
            "no line is missing in the middle of a log",
            "lines were removed, or could not be written (a full disk); they are not checked",
        ),
        Rule(
            "unreadable",
            "every line is a record, except a last line that a kill cut off",
            "the file was changed or damaged, or is from another version; the line is not checked",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    job: str
    """Empty if it concerns no single job."""
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
    """``kept`` has the first violations of each rule, ``counts`` the number of all."""

    def __init__(self) -> None:
        self.kept: list[Violation] = []
        self.counts: Counter[str] = Counter()

    def add(self, rule: str, job: str, what: str, *records: Place) -> None:
        self.counts[rule] += 1
        if self.counts[rule] <= KEPT_PER_RULE:
            self.kept.append(Violation(RULES[rule].name, job, what, records))
