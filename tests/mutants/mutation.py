"""A planted bug: a small change of the source that breaks one rule, and the stored check that must catch it.

A check is a stored trace of ``simulation.traces``, seeds of the simulation, or a test by its id.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trace:
    name: str

    def __str__(self) -> str:
        return f"trace {self.name}"


@dataclass(frozen=True)
class Seeds:
    """``count`` seeds from ``first`` on; one that fails is enough."""

    lighthouses: int
    first: int
    count: int

    def __str__(self) -> str:
        return f"seeds {self.first} to {self.first + self.count - 1}, lighthouses: {self.lighthouses}"


@dataclass(frozen=True)
class Test:
    id: str

    def __str__(self) -> str:
        return self.id.removeprefix("tests/")


Check = Trace | Seeds | Test


@dataclass(frozen=True)
class Mutation:
    """``name``: the broken behaviour. ``old`` occurs exactly once in ``file``; ``new`` replaces it."""

    name: str
    file: str
    old: str
    new: str
    check: Check
