"""The layout of a rank: what all groups must have in common, in lines, from parts that may change between two steps.

A group that starts may know less than the job: the groups may have unfrozen parameters since. If its own parts could
have the lines of the job, it adopts them with its next request, and the script goes on from the state that it heals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keepstep_mesh.errors import KeepstepError


class LayoutChanges(KeepstepError):
    """No quorum formed, because this group has other lines than the job, which it adopts with its next request."""


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
    """The parts of one rank, in the order in which the script made them."""

    def __init__(self) -> None:
        self._parts: list[LayoutPart] = []

    def add(self, part: LayoutPart) -> None:
        """Add a part."""
        self._parts.append(part)

    def lines(self) -> list[str]:
        """Return the present lines of all parts."""
        return [line for part in self._parts for line in part.lines()]

    def could_be(self, lines: Sequence[str]) -> bool:
        """Return whether the parts could have the ``lines`` of another group, and have others now."""
        return self._split(lines) is not None and self.lines() != list(lines)

    def adopt(self, lines: Sequence[str]) -> None:
        """Change to the ``lines`` of another group, if the parts could have them."""
        for part, its in self._split(lines) or ():
            part.adopt(its)

    def _split(self, lines: Sequence[str]) -> list[tuple[LayoutPart, list[str]]] | None:
        """Return each part with the lines that it could have; None: they are not the lines of these parts."""
        found, rest = [], list(lines)
        for part in self._parts:
            count = part.matching(rest)
            if not count:
                return None
            found.append((part, rest[:count]))
            rest = rest[count:]
        return None if rest else found
