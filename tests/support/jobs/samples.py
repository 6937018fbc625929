"""Check from the lines of ``elastic_trainer.py`` that each sample of an epoch was in exactly one committed step."""

from __future__ import annotations

from collections import Counter

from tests.support.jobs.job import Group


def taken_once(*groups: Group) -> int:
    """Fail if the committed steps left a sample of an epoch out, or took one twice.

    A group may be killed after its gradient was averaged and before it prints that the step committed: one group that
    prints it is enough. If the groups repeated a step that only a killed one had committed, the repetition counts.

    Returns:
        Number of epochs that were completed.
    """
    committed: dict[int, int] = {}
    for group in groups:
        for line in group.lines:
            if line["event"] == "committed" and line["quorum_id"] is not None:
                committed[line["step"]] = max(line["quorum_id"], committed.get(line["step"], 0))
    taken = Counter[tuple[int, int]]()
    for group in groups:
        trains = {(line["step"], line["quorum_id"]): line for line in group.lines if line["event"] == "trains"}
        for (step, quorum_id), line in trains.items():
            if committed.get(step) == quorum_id:
                taken.update((line["epoch"], sample) for sample in line["samples"])
    ended = {line["epoch"] for group in groups for line in group.lines if line["event"] == "ended"}
    samples = {sample for _, sample in taken}
    wrong = {key: times for key, times in taken.items() if times != 1}
    wrong |= {(epoch, sample): 0 for epoch in ended for sample in samples if (epoch, sample) not in taken}
    assert not wrong, f"of {len(wrong)} samples, how often they were in a step: {dict(sorted(wrong.items())[:10])}"
    return len(ended)
