"""The layout of a rank: what all groups must have in common, in lines, from parts that may change between two steps.

A group that starts may know less than the job. The groups may have unfrozen parameters since: if its own parts could
have the lines of the job, it adopts them with its next request. Or the groups may have added parts since, such as a
second model: then the group takes over the step of the job, and its script comes to the lines that add them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keepstep_mesh.errors import KeepstepError


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
