"""Long work in small pieces, so that a server can do other work between them. Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Work = Generator[None, None, T]
"""Yields between two pieces, and returns the result."""


def whole(work: Work[T]) -> T:
    """Do all the work at once, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
