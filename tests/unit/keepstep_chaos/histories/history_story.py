"""A small valid history of two lighthouses and two groups, as logs that can be changed."""

from __future__ import annotations

import json
from typing import Any

Line = dict[str, Any]


class Story:
    """Logs as lists of lines that can be changed. Numbers of lines and of events are made at the end (``numbered``)."""

    def __init__(self) -> None:
        self.logs: dict[str, list[Line]] = {}
        self.held: dict[str, tuple[int, int | str]] = {}
        """(step, lineage) of each incarnation."""
        self.answer: dict[str, tuple[int, int]] = {}

    def event(self, log: str, epoch: int, kind: str, replica_id: str = "", **detail: Any) -> Line:
        line = {"job": "" if kind == "term" else "job", "epoch": epoch, "kind": kind, "replica_id": replica_id}
        return self.add(log, line | {"detail": detail})

    def quorum(self, log: str, epoch: int, quorum_id: int, *members: str) -> Line:
        """Made by the lighthouse, and its members, as far as they have started, hear of it."""
        line = self.event(log, epoch, "quorum", quorum_id=quorum_id, members=list(members))
        self.join(epoch, quorum_id, *members)
        return line

    def join(self, epoch: int, quorum_id: int, *members: str) -> None:
        for who in members:
            if who in self.held:
                self.answer[who] = epoch, quorum_id
                self.step(who, "quorum", members=list(members), participants=len(members))

    def start(self, *names: str) -> None:
        for who in names:
            self.held[who] = 0, who
            self.step(who, "started", lineage=who)

    def heal(self, who: str, source: str) -> None:
        self.held[who] = self.held[source]
        self.step(who, "healed", lineage=self.held[who][1])

    def commit(self, *names: str, participants: int = 0) -> None:
        for who in names:
            step, lineage = self.held[who]
            self.held[who] = step + 1, self.answer[who][1]
            self.step(who, "committed", lineage=lineage, participants=participants or len(names))

    def step(self, who: str, event: str, **detail: Any) -> Line:
        epoch, quorum_id = self.answer.get(who, (0, 0))
        line = {"job": "job", "replica_id": who, "group_rank": 0, "event": event, "step": self.held[who][0]}
        return self.add(f"{who}.jsonl", line | {"epoch": epoch, "quorum_id": quorum_id} | detail)

    def add(self, log: str, line: Line) -> Line:
        self.logs.setdefault(log, []).append(line)
        return line

    def find(self, log: str, **facts: Any) -> Line:
        """The one line of ``log`` with these facts, in its detail too."""
        (found,) = [one for one in self.logs[log] if facts.items() <= ({**one, **one.get("detail", {})}).items()]
        return found

    def numbered(self) -> dict[str, list[str]]:
        """Numbers what has no number yet."""
        for lines in self.logs.values():
            last = 0
            for count, line in enumerate(lines, 1):
                if "kind" in line:
                    last = line.setdefault("id", max(last, line["epoch"] << 32) + 1)
                else:
                    line.setdefault("n", count)
        return {log: [json.dumps(line) for line in lines] for log, lines in self.logs.items()}

    def place(self, line: Line) -> str:
        (found,) = [f"{log}:{i}" for log, lines in self.logs.items() for i, one in enumerate(lines, 1) if one is line]
        return found


def valid() -> Story:
    """Two lighthouses, one after the other; a is killed and comes back as a:2, which is evicted in the end."""
    story = Story()
    story.event("l1.jsonl", 1, "term", owner="one")
    story.start("a:1", "b:1")
    story.quorum("l1.jsonl", 1, 1, "a:1", "b:1")
    story.heal("b:1", "a:1")
    for _ in range(3):
        story.commit("a:1", "b:1")
    story.commit("a:1", participants=2)  # and is killed: b never saw the end of step 4
    story.step("b:1", "discarded")
    story.quorum("l1.jsonl", 1, 2, "b:1")
    story.commit("b:1")
    story.commit("b:1")
    story.event("l2.jsonl", 2, "term", owner="two")
    story.join(2, 2, "b:1")
    story.commit("b:1")
    story.start("a:2")
    story.quorum("l2.jsonl", 2, 3, "a:2", "b:1")
    story.heal("a:2", "b:1")
    story.commit("a:2", "b:1", participants=1)
    story.commit("a:2", "b:1")
    story.event("l2.jsonl", 2, "evicted", "a", incarnations=["a:2"], quorum_id=3)
    story.quorum("l2.jsonl", 2, 4, "b:1")
    story.commit("b:1")
    return story
