"""A planted mistake: a small change of the source that breaks one rule, and the stored check that must catch it.

A check is a stored trace of ``simulation.traces``, seeds of a simulation, or a test by its id.
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
    """The first of them that fails is enough."""

    lighthouses: int
    first: int
    count: int

    def __str__(self) -> str:
        kind = "one lighthouse" if self.lighthouses == 1 else "failover"
        return f"seeds {self.first} to {self.first + self.count - 1}, {kind}"


@dataclass(frozen=True)
class Test:
    id: str

    def __str__(self) -> str:
        return self.id.removeprefix("tests/")


Check = Trace | Seeds | Test


@dataclass(frozen=True)
class Mutation:
    """``name``: what is broken, in the words of the rules. ``old`` occurs once in ``file``; ``new`` takes its place."""

    name: str
    file: str
    old: str
    new: str
    check: Check
