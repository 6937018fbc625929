"""The outcome of one row of the fault runs, as a row of a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from keepstep_chaos.histories.history import Report

COLUMNS = (
    "what is done",
    "times",
    "what must hold",
    "gap between commits: p50 / p95 / worst",
    "checked history",
    "compared weights",
)


def p95(samples: Iterable[float]) -> float:
    """Nearest rank: the smallest sample that at least 95 % of all do not exceed."""
    ordered = sorted(samples)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


STATISTICS = {"p50": statistics.median, "p95": p95, "worst": max}


@dataclass(frozen=True, slots=True)
class Limit:
    """The upper limit of a statistic over the seconds of a row."""

    statistic: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.statistic} at most {self.seconds:g} s"


@dataclass(slots=True)
class Outcome:
    """``wanted``: number of repetitions. ``network``: what cut hosts off from each other, if the row does that."""

    name: str
    what: str
    wanted: int
    limit: Limit | None
    holds: str = ""
    network: str = ""
    seconds: list[float] = field(default_factory=list)
    """One for each repetition."""
    exited: list[str] = field(default_factory=list)
    """Groups that exited without being killed."""
    compared: int = 0
    """Committed steps whose weights were compared with another group's."""
    epochs: int = 0
    quorums: int = 0
    steps: int = 0
    violations: int = 0
    took: float = 0.0
    broken: list[str] = field(default_factory=list)
    """Broken promises, as sentences."""

    def take(self, report: Report | None) -> None:
        if report is None:
            return
        self.violations = report.counts.total()
        for job in report.jobs.values():
            self.epochs, self.quorums, self.steps = job.epochs, job.quorums, job.steps

    def judge(self) -> None:
        """Add the promises to ``broken`` that the figures contradict."""
        if self.exited:
            self.broken.append(f"trainers exited: {', '.join(self.exited)}")
        if self.limit is not None and self.seconds:
            found = STATISTICS[self.limit.statistic](self.seconds)
            if found > self.limit.seconds:
                self.broken.append(f"{self.limit.statistic} is {found:.2f} s (limit {self.limit.seconds:g} s)")
        if len(self.seconds) < self.wanted and not self.broken:
            self.broken.append(f"repeated {len(self.seconds)} times of {self.wanted}")
        if not self.compared and not self.broken:
            self.broken.append("no weights were compared")

    def json(self) -> dict[str, Any]:
        return {**asdict(self), **({name: of(self.seconds) for name, of in STATISTICS.items()} if self.seconds else {})}

    def cells(self) -> tuple[str, ...]:
        gaps = " / ".join(f"{of(self.seconds):.2f}" for of in STATISTICS.values()) if self.seconds else "none"
        limit = [f"gap: {self.limit}"] if self.limit else []
        history = f"{_count(self.steps, 'step')}, {_count(self.epochs, 'epoch')}"
        if self.violations or not self.steps:
            history = _count(self.violations, "violation") if self.steps else "not checked"
        return (
            self.what + (f" ({self.network})" if self.network else ""),
            f"{len(self.seconds)}",
            "; ".join([self.holds, *limit]),
            f"{gaps} s",
            history,
            "**broken**" if self.broken else f"{self.compared:,}",
        )


def table(outcomes: Iterable[Outcome]) -> str:
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(one.cells() for one in outcomes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
