"""Follow the demo and choose the next kill. Pure: entries of the step log in, facts and decisions out.

The job has survived a kill when the group commits with all others again (for the lighthouse: at the next commit that
needed it). The next kill follows ``settle`` seconds later. Times are Unix seconds, as in the log.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIGHTHOUSE = "lighthouse"


class State(enum.Enum):
    STARTING = "starting"
    HEALING = "healing"
    TRAINING = "training"
    DOWN = "killed"
    FINISHED = "finished"


@dataclass(slots=True)
class GroupFacts:
    state: State = State.STARTING
    step: int = 0
    loss: float | None = None
    restarts: int = 0
    accuracy: float | None = None
    weights: str | None = None
    """Digest of the weights at the end."""


@dataclass(slots=True)
class Kill:
    victim: str
    at: float
    quorum_id: int
    """The highest quorum_id of a commit before the kill."""
    step: int
    """The highest committed step before the kill."""
    next_commit: float | None = None
    """Seconds until the others committed a step that began after the kill."""
    back: float | None = None
    """Seconds until all groups took part again."""


def _groups(number: int) -> str:
    return "1 group" if number == 1 else f"{number} groups"


class Story:
    """``groups``: names; ``victims``: groups and the lighthouse, in the order of their kills."""

    def __init__(self, groups: Sequence[str], victims: Sequence[str], settle: float) -> None:
        self.groups = {name: GroupFacts() for name in groups}
        self.kills: list[Kill] = []
        self.happenings: list[str] = []
        self.bytes_healed = 0
        self.retried = 0
        self.participants = 0
        self.quorum_id = 0
        self.step = 0
        self._victims = deque(victims)
        self._settle = settle
        self._all_there_since: float | None = None
        self._first_commit: float | None = None
        self._last_commit = 0.0

    # ---- events

    def heard(self, group: str, entry: dict[str, Any]) -> None:
        """Process one entry of the step log."""
        facts, at, event = self.groups[group], float(entry["t"]), entry["event"]
        if event == "quorum":
            facts.state = State.HEALING if facts.state is State.STARTING and self.step > 0 else facts.state
        elif event == "healed":
            self.bytes_healed += int(entry["bytes"])
            if self.step > 0:
                self._say(at, f"{group} healed {entry['bytes']:,} bytes in {entry['seconds']:.2f} s")
        elif event == "discarded":
            self.retried += 1
        elif event == "committed":
            facts.state, facts.step = State.TRAINING, int(entry["step"])
            self._committed(group, at, entry)

    def learnt(self, group: str, loss: float) -> None:
        self.groups[group].loss = loss

    def restarted(self, group: str) -> None:
        if group in self.groups:
            self.groups[group].state = State.STARTING
            self.groups[group].restarts += 1

    def died(self, group: str, how: str, at: float) -> None:
        """Report the end of a group, unless the demo killed it."""
        kill = self.kills[-1] if self.kills else None
        if kill is None or kill.victim != group or kill.back is not None:
            self._say(at, f"{group}: {how}, without a kill by the demo")

    def noted(self, sentence: str, at: float) -> None:
        """Report a sentence about the job."""
        self._say(at, sentence)

    def ended(self, group: str, accuracy: float, weights: str) -> None:
        facts = self.groups[group]
        facts.state, facts.accuracy, facts.weights = State.FINISHED, accuracy, weights

    def killed(self, victim: str, at: float) -> None:
        """Record a SIGKILL to ``victim``."""
        self.kills.append(Kill(victim, at, self.quorum_id, self.step))
        self._all_there_since = None
        if victim in self.groups:
            self.groups[victim].state = State.DOWN
        self._say(at, f"SIGKILL to {victim} after step {self.step}")

    def _committed(self, group: str, at: float, entry: dict[str, Any]) -> None:
        step, quorum_id, participants = int(entry["step"]), int(entry["quorum_id"]), int(entry["participants"])
        if self._first_commit is None:
            self._first_commit = at
            self._say(at, f"first step committed by {_groups(participants)}")
        self._last_commit = max(self._last_commit, at)
        self.step = max(self.step, step)
        if quorum_id >= self.quorum_id:
            self.quorum_id, self.participants = quorum_id, participants
        kill = self._pending()
        if kill is not None and at <= kill.at:
            kill.step, kill.quorum_id = max(kill.step, step), max(kill.quorum_id, quorum_id)
        elif kill is not None:
            self._recovering(kill, group, at, entry)
        everybody = participants == len(self.groups)
        if not everybody or self._pending() is not None:
            self._all_there_since = None
        elif self._all_there_since is None:
            self._all_there_since = at

    def _recovering(self, kill: Kill, group: str, at: float, entry: dict[str, Any]) -> None:
        if kill.victim == LIGHTHOUSE:
            # The current step may have had its quorum before the kill; the one after it cannot.
            if entry["step"] >= kill.step + 2:
                kill.next_commit = kill.back = at - kill.at
                self._say(at, f"next step committed {kill.next_commit:.2f} s after the kill, without a restart")
            return
        if entry["quorum_id"] <= kill.quorum_id:
            return
        if kill.next_commit is None and group != kill.victim:
            kill.next_commit = at - kill.at
            self._say(
                at, f"next step committed {kill.next_commit:.2f} s after the kill, by {_groups(entry['participants'])}"
            )
        if group == kill.victim and entry["participants"] == len(self.groups) and kill.next_commit is not None:
            kill.back = at - kill.at
            self._say(at, f"{kill.victim} is back, {kill.back:.2f} s after the kill, at step {entry['step']}")

    def _say(self, at: float, what: str) -> None:
        begin = self._first_commit if self._first_commit is not None else at
        self.happenings.append(f"{max(0.0, at - begin):6.2f} s  {what}")

    # ---- decisions

    def _pending(self) -> Kill | None:
        return self.kills[-1] if self.kills and self.kills[-1].back is None else None

    def next_kill(self, now: float) -> str | None:
        """Return the next victim, and remove it from the list; None if it is too early."""
        since = self._all_there_since
        if self._victims and self._pending() is None and since is not None and now - since >= self._settle:
            return self._victims.popleft()
        return None

    def over(self, now: float) -> bool:
        """Whether all victims were killed and are back."""
        since = self._all_there_since
        return not self._victims and self._pending() is None and since is not None and now - since >= self._settle

    def steps_per_second(self) -> float:
        first = self._first_commit
        return self.step / (self._last_commit - first) if first is not None and self._last_commit > first else 0.0

    def bit_identical(self) -> bool:
        weights = {one.weights for one in self.groups.values()}
        return len(weights) == 1 and None not in weights

    def succeeded(self) -> bool:
        """Whether the job survived all kills, and all groups ended with the same weights."""
        return not self._victims and self._pending() is None and self.bit_identical()

    def summary(self) -> dict[str, Any]:
        """Return the content of demo-summary.json; times in seconds."""
        waits = [kill.next_commit for kill in self.kills if kill.next_commit is not None]
        backs = [kill.back for kill in self.kills if kill.back is not None and kill.victim != LIGHTHOUSE]
        return {
            "replicas": len(self.groups),
            "steps_committed": self.step,
            "steps_retried": self.retried,
            "kills": len(self.kills),
            "kills_survived": sum(kill.back is not None for kill in self.kills),
            "seconds_from_kill_to_next_commit": {
                "p50": round(statistics.median(waits), 3) if waits else None,
                "max": round(max(waits), 3) if waits else None,
            },
            "seconds_from_kill_until_the_group_is_back": {
                "p50": round(statistics.median(backs), 3) if backs else None,
                "max": round(max(backs), 3) if backs else None,
            },
            "bytes_healed": self.bytes_healed,
            "test_accuracy": {name: one.accuracy for name, one in self.groups.items()},
            "weights": {name: one.weights for name, one in self.groups.items()},
            "weights_bit_identical": self.bit_identical(),
            "each_kill": [
                {
                    "victim": kill.victim,
                    "step": kill.step,
                    "seconds_to_next_commit": None if kill.next_commit is None else round(kill.next_commit, 3),
                    "seconds_to_all_back": None if kill.back is None else round(kill.back, 3),
                }
                for kill in self.kills
            ],
        }
