"""Check that every sample of every epoch is in exactly one committed step. Pure, except for ``read``.

A step may commit again under a later quorum, if no member of that quorum had it: the latest commit counts. A group that
dies between the commit and its log line has logged what it drew before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

UNTIL_TOLD = 10**9
"""The last step, as long as the training shall go on."""


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all ``*.samples``; a line that a kill cut off is skipped."""
    found = []
    for path in sorted(folder.glob("*.samples")):
        for line in path.read_text().splitlines():
            try:
                found.append({"group": path.stem, **json.loads(line)})
            except ValueError:
                continue
    return found


def quorum_of(lineage: object) -> int:
    """Return the quorum of a committed lineage; 0 for any other."""
    text = str(lineage)
    last = text.rpartition(":")[2]
    return int(last) if last.isdecimal() and not text.startswith("behind:") else 0


def problems(records: Iterable[dict[str, Any]], samples: int) -> tuple[int, list[str]]:
    """Return the number of checked samples, and sentences about samples that are missing or counted twice."""
    drawn: dict[tuple[int, int, int], dict[str, Any]] = {}
    committed: dict[int, dict[Any, dict[int, dict[str, Any]]]] = {}
    for record in records:
        if record["rank"] is None:
            continue
        if record["event"] == "drawn":
            drawn[record["step"], record["groups"], record["rank"]] = record
        else:
            of_step = committed.setdefault(record["step"], {})
            of_step.setdefault(record["lineage"], {})[record["rank"]] = record
    epochs: dict[int, dict[int, int]] = {}
    wrong: list[str] = []
    for step, lineages in sorted(committed.items()):
        shares = lineages[max(lineages, key=quorum_of)]
        some = next(iter(shares.values()))
        for rank in range(some["groups"]):
            share = shares.get(rank) or drawn.get((step, some["groups"], rank))
            if share is None or share["epoch"] != some["epoch"]:
                wrong.append(f"step {step}: the share of rank {rank} of {some['groups']} is not in the logs")
                continue
            counts = epochs.setdefault(share["epoch"], {})
            for index in share["indices"]:
                counts[index] = counts.get(index, 0) + 1
    last = max(epochs, default=0)
    for epoch, counts in sorted(epochs.items()):
        twice = [index for index, count in counts.items() if count > 1]
        missing = samples - len(counts) if epoch != last else 0
        if twice or missing:
            wrong.append(f"epoch {epoch}: {missing} samples in no committed step, {len(twice)} in several: {twice[:5]}")
    if committed and (gaps := max(committed) - min(committed) + 1 - len(committed)):
        wrong.append(f"{gaps} steps are not in the logs")
    return sum(sum(counts.values()) for counts in epochs.values()), wrong


def false_verdicts(events: Iterable[dict[str, Any]], faults: Iterable[dict[str, Any]]) -> list[str]:
    """Return a sentence for each group that was ended for a hang, although no fault let it hang for that long.

    Args:
        events: of the lighthouses.
        faults: of ``keepstep chaos``, as in its ``results.json``.
    """
    hung = [(one["target"], one["seconds"]) for one in faults if one["kind"] in ("hang", "hang-loop")]
    found = []
    for event in events:
        if event["kind"] != "hung" or not event["detail"]["ended"]:
            continue
        name, detail = event["replica_id"].partition(":")[0], event["detail"]
        if not any(target == name and lasted >= detail["seconds"] - 1.0 for target, lasted in hung):
            found.append(f"false verdict: {detail['reason']}")
    return found
