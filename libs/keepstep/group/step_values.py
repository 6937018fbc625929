"""The values with which the optimizers of a rank took its last steps, as groups compare them. Pure.

Each group sends a digest of them with its next request, and the lighthouse compares the digests of a step. A group that
differs reads the values of another group to name the difference.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

Values: TypeAlias = tuple[tuple[str, str], ...]
"""The name of what has values, and a line for each value: its name, a tab, and its text."""

REMEMBERED_STEPS = 8
"""Steps of which the values are kept for groups that look for a difference."""
MAX_SHOWN = 200
"""Limit of a name or a value in a sentence, in characters."""


class StepValues:
    """The values of the last steps of one rank."""

    def __init__(self) -> None:
        self._steps: OrderedDict[str, Values] = OrderedDict()

    def add(self, quorum_id: int, step: int, values: Values) -> str:
        """Keep the values of a committed step, and return their digest.

        Args:
            quorum_id: of the step.
            step: number of committed steps before it.
            values: equal ones have equal digests, in every process.
        """
        self._steps[f"{quorum_id}/{step}"] = values
        while len(self._steps) > REMEMBERED_STEPS:
            self._steps.popitem(last=False)
        text = "\n\n".join(f"{owner}\n{lines}" for owner, lines in values)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def lines(self) -> dict[str, dict[str, str]]:
        """Return the values as text, by name, of each step that is kept; the newest step last. From any thread."""
        return {step: dict(_pairs(values)) for step, values in list(self._steps.items())}


def _pairs(values: Values) -> Iterator[tuple[str, str]]:
    for owner, lines in values:
        for line in lines.splitlines():
            name, _, text = line.partition("\t")
            yield f"{owner} {name}".strip(), text


def values_difference(ours: dict[str, dict[str, str]], theirs: object, peer: str) -> str:
    """Describe the first difference of the newest step that differs; empty: none is known.

    Args:
        ours: ``StepValues.lines`` here.
        theirs: the same of ``peer``, as received.
        peer: name of the other group.
    """
    for step in reversed(ours):
        other = theirs.get(step) if isinstance(theirs, Mapping) else None
        if isinstance(other, Mapping) and other != ours[step]:
            for name in [*ours[step], *(str(one) for one in other)]:
                here, there = ours[step].get(name, "unknown"), str(other.get(name, "unknown"))
                if here != there:
                    return f"{name[:MAX_SHOWN]}: {here[:MAX_SHOWN]} here, {there[:MAX_SHOWN]} in {peer}"
    return ""
