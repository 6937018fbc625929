"""Settings, parameters, and optimizer values that all groups of a job must have in common. Pure.

* Settings that decide the arithmetic travel as text; the lighthouse compares them from the first request on, and names
  the difference.
* The layout: lines that describe the parameters of a rank, known after a model is wrapped, from parts that may change
  between two steps. Groups send a digest of them; a group whose digest differs reads the lines of another group. A
  group that starts may know less than the job. The groups may have unfrozen parameters since: if its own parts could
  have the lines of the job, it adopts them with its next request. Or the groups may have added parts since, such as a
  second model: then the group takes over the step of the job, and its script comes to the lines that add them.
* The values with which the optimizers of a rank took its last steps. Each group sends a digest of them with its next
  request, and the lighthouse compares the digests of a step. A group that differs reads the values of another group to
  name the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from keepstep.group.quorum_plan import WorldSizeMode
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import differ, difference, settings_text

ARITHMETIC = 5
"""Version of the arithmetic of a step.

Increase it with every change after which a step computes other numbers from the same inputs: divisions and their order,
the precision or order of a reduction, the choice of averaged buffers, the encoding of values or of a state. Groups
of different versions then refuse to train together instead of drifting apart.
"""
Values: TypeAlias = tuple[tuple[str, str], ...]
"""The name of what has values, and a line for each value: its name, a tab, and its text."""

REMEMBERED_STEPS = 32
"""Steps of which the values are kept, for groups that look for a difference, or catch up."""
MAX_SHOWN = 200
"""Limit of a name or a value in a sentence, in characters."""


# ---- settings


def group_settings(
    *,
    use_async_quorum: bool,
    world_size_mode: WorldSizeMode,
    min_replica_size: int,
    init_sync: bool,
    refuse_nonfinite: bool,
    durable_every: int = 0,
    retry_allreduce: bool = False,
    spares: int = 0,
    process_group: Mapping[str, str] | None = None,
) -> str:
    """Return the settings that decide the arithmetic, as groups compare them.

    Add new settings here. Leave one out at the value that stands for what the release before does: groups of both
    releases then train together.

    ``spares``: number of groups that stand by, which decides how many train.
    ``process_group``: those without which the process groups do not connect.
    """
    places = f" of {min_replica_size}" if world_size_mode is WorldSizeMode.FIXED_WITH_SPARES else ""
    return settings_text(
        {
            "arithmetic": ARITHMETIC,
            "use_async_quorum": use_async_quorum,
            "world_size_mode": f"{world_size_mode.name}{places}",
            "init_sync": init_sync,
            "refuse_nonfinite": refuse_nonfinite,
            **({"durable_every": durable_every} if durable_every else {}),
            **({"retry_allreduce": True} if retry_allreduce else {}),
            **({"KEEPSTEP_SPARES": spares} if spares else {}),
            **(process_group or {}),
        }
    )


# ---- parameters


class LayoutChanges(KeepstepError):
    """No quorum formed, because this group has other lines than the job, which it adopts with its next request."""


class PartsMissing(LayoutChanges):
    """No quorum formed, because the job has parts that the script of this group may add later."""


class LayoutPart(Protocol):
    """Lines that may change between two steps. Its methods are called on the training thread."""

    def lines(self) -> list[str]:
        """Return the present lines."""

    def matching(self, lines: Sequence[str]) -> int:
        """Return how many of the first ``lines`` this part could have instead of its own. 0: it cannot have them."""

    def adopt(self, lines: Sequence[str]) -> None:
        """Change to ``lines``, which ``matching`` found to fit."""


class FixedLines:
    """Lines that never change."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    def lines(self) -> list[str]:
        """Return the lines."""
        return self._lines

    def matching(self, lines: Sequence[str]) -> int:
        """Return their number, if they are the first ``lines``."""
        return len(self._lines) if list(lines[: len(self._lines)]) == self._lines else 0

    def adopt(self, lines: Sequence[str]) -> None:
        """Keep the lines, which are equal."""


class Layout:
    """The parts of one rank.

    First those that may change, in the order in which the script made them; then the fixed ones, sorted: a group that
    starts later may make in one step, and in another order, what the others have made one after the other.
    """

    def __init__(self) -> None:
        self._parts: list[LayoutPart] = []

    def add(self, part: LayoutPart) -> None:
        """Add a part."""
        self._parts.append(part)
        self._parts.sort(key=lambda one: (1, one.lines()) if isinstance(one, FixedLines) else (0, []))

    def lines(self) -> list[str]:
        """Return the present lines of all parts."""
        return [line for part in self._parts for line in part.lines()]

    def could_be(self, lines: Sequence[str]) -> bool:
        """Return whether the parts could have the ``lines`` of another group, and have others now."""
        found, missing = self._split(lines)
        return len(found) == len(self._parts) and not missing and self.lines() != list(lines)

    def missing(self, lines: Sequence[str]) -> list[str]:
        """Return the ``lines`` of another group that no part could have, if each part could have some of the others."""
        found, missing = self._split(lines)
        return missing if len(found) == len(self._parts) else []

    def adopt(self, lines: Sequence[str]) -> None:
        """Change to those ``lines`` of another group that the parts could have, if each part could have some."""
        found, _ = self._split(lines)
        if len(found) == len(self._parts):
            for part, its in zip(self._parts, found, strict=True):
                part.adopt(its)

    def _split(self, lines: Sequence[str]) -> tuple[list[Sequence[str]], list[str]]:
        """Return the lines that each part could have, one part after the other, and the lines between them."""
        found: list[Sequence[str]] = []
        missing: list[str] = []
        at = 0
        while at < len(lines):
            count = self._parts[len(found)].matching(lines[at:]) if len(found) < len(self._parts) else 0
            if count:
                found.append(lines[at : at + count])
            else:
                missing.append(lines[at])
            at += count or 1
        return found, missing


def layout_digest(settings: str, lines: list[str]) -> str:
    """Return the digest of settings and layout lines, which all groups must have in common; empty for no lines.

    The settings are included because an older lighthouse or group compares only the digest.
    """
    return hashlib.blake2b("\n".join([settings, *lines]).encode(), digest_size=16).hexdigest() if lines else ""


def first_difference(
    settings: str, lines: list[str], their_settings: str, their_lines: list[str], peer: str, rank: int = 0
) -> str:
    """Describe the first difference between a rank of this group and the same rank of ``peer`` in a sentence."""
    if differ(settings, their_settings):
        return difference(settings, "here", their_settings, peer)
    for number, (mine, other) in enumerate(zip(lines, their_lines, strict=False)):
        if mine != other:
            return f"first difference, entry {number}: here {mine!r}, in {peer} {other!r}"
    if len(lines) != len(their_lines):
        longer, where = (lines, "here") if len(lines) > len(their_lines) else (their_lines, f"in {peer}")
        return f"first difference: only {where}: {longer[min(len(lines), len(their_lines))]!r}"
    if settings != their_settings:
        return f"the parameters are equal, but {peer} runs another version of keepstep; run one version in all groups"
    return (
        f"rank {rank}'s parameters are equal, and those of another rank differ; use the same number of ranks, in the "
        f"same order on the device mesh, in all groups"
    )


# ---- values


class StepValues:
    """The values of the last steps of one rank."""

    def __init__(self) -> None:
        self._steps: dict[str, Values] = {}
        self._digest: tuple[Values | None, str] = (None, "")
        """The last values, and their digest."""

    def add(self, quorum_id: int, step: int, values: Values) -> str:
        """Keep the values of a committed step, and return their digest.

        Args:
            quorum_id: of the step.
            step: number of committed steps before it.
            values: equal ones have equal digests, in every process.
        """
        self._steps[f"{quorum_id}/{step}"] = values
        while len(self._steps) > REMEMBERED_STEPS:
            del self._steps[next(iter(self._steps))]
        if values is not self._digest[0]:
            text = "\n\n".join(f"{owner}\n{lines}" for owner, lines in values)
            self._digest = values, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._digest[1]

    def lines(self) -> dict[str, dict[str, str]]:
        """Return the values as text, by name, of each step that is kept; the newest step last. From any thread."""
        steps = (
            self._steps.copy()
        )  # at once. A list of its items may be interrupted: a garbage collection may run Python
        return {step: dict(_pairs(values)) for step, values in steps.items()}


def changes(before: Values, after: Values) -> list[str]:
    """Describe the values of the same optimizers that differ, as phrases."""
    was, now = dict(_pairs(before)), dict(_pairs(after))
    return [
        f"{name[:MAX_SHOWN]} from {old[:MAX_SHOWN]} to {now[name][:MAX_SHOWN]}"
        for name, old in was.items()
        if now.get(name, old) != old
    ]


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
