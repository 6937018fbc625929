"""The result of a run: its figures, the promises that were broken, the tables, and the report in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from keepstep_chaos.observing.resources import Growth
from keepstep_chaos.recovery import Cost
from keepstep_chaos.vocabulary import KINDS, Target

COLUMNS = (
    *("fault", "number", "detected p50", "next commit p50", "max", "commit gap p50", "max", "recovered p50", "max"),
    *("discarded", "false evictions"),
)
GROWTH_COLUMNS = ("target", "processes", "watched", "memory", "growth", "descriptors", "growth")


@dataclass(slots=True)
class Outcome:
    """Result of a run."""

    seed: int
    seconds: float
    costs: Sequence[Cost]
    commits: int
    growth: Mapping[Target, Growth]
    wedged: bool = False
    unrecovered: Sequence[Target] = ()
    """Targets that had not recovered at the end."""
    unseen: Sequence[Target] = ()
    """Targets that were hit, and which this machine cannot ask whether they work again."""
    violations: Sequence[str] = ()
    """Of ``check-history``."""
    checked_steps: int | None = None
    """Steps in the logs that it read; None: no logs."""
    compared_weights: int = 0
    different_weights: Sequence[str] = ()
    comparisons: int = 0
    """Answers to ``keepstep verify-replicas``."""
    differences: int = 0
    """Those that found different weights."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Kinds of faults that could hit no target, with the reason."""
    step_seconds: float | None = None
    """Usual time of a step."""
    goodput: float | None = None
    """Share of the time of all groups that went into committed steps; None: no step logs."""
    samples_per_step: int | None = None
    """That each group takes in a step; None: not known."""
    groups: int = 0
    keeps_steps: bool = False
    """Whether the job promises to lose no committed step: its model exists once, and no more groups were hit at once
    than it has copies."""

    @property
    def injected(self) -> list[Cost]:
        return [cost for cost in self.costs if not cost.failed]

    @property
    def discarded(self) -> int:
        return sum(cost.discarded for cost in self.costs)

    @property
    def lost_steps(self) -> int:
        """Committed steps that the job gave up."""
        return sum(cost.went_back for cost in self.costs)

    @property
    def lost_samples(self) -> int | None:
        """Samples in steps that were discarded or given up; None: not known."""
        if self.samples_per_step is None:
            return None
        return self.samples_per_step * (self.discarded + self.lost_steps * self.groups)

    def broken(self) -> list[str]:
        """Return the promises that were broken, as sentences."""
        found = ["the job is wedged: no step committed although enough groups were able to"] if self.wedged else []
        found += [f"{target} did not recover" for target in self.unrecovered]
        found += [f"history: {one}" for one in self.violations]
        if self.keeps_steps and self.lost_steps:
            found.append(f"{self.lost_steps} committed steps were lost, although keepers had copies of the shards")
        found += self.different_weights
        if self.differences:
            found.append(f"{self.differences} of {self.comparisons} comparisons found groups with different weights")
        return found

    def json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "faults": len(self.injected),
            "not_injected": len(self.costs) - len(self.injected),
            "faults_per_minute": round(60 * len(self.injected) / max(self.seconds, 1e-9), 1),
            "commits": self.commits,
            "commits_per_second": round(self.commits / max(self.seconds, 1e-9), 2),
            "step_seconds": self.step_seconds,
            "goodput": self.goodput,
            "longest_commit_gap_seconds": max((cost.commit_gap_seconds or 0.0 for cost in self.costs), default=0.0),
            "discarded": self.discarded,
            "lost_steps": self.lost_steps,
            "lost_samples": self.lost_samples,
            "retried": sum(cost.retried for cost in self.costs),
            "false_evictions": sum(len(cost.lost) for cost in self.costs),
            "wedged": self.wedged,
            "checked_steps": self.checked_steps,
            "violations": list(self.violations),
            "compared_weights": self.compared_weights,
            "comparisons": self.comparisons,
            "broken": self.broken(),
            "unseen": [str(target) for target in self.unseen],
            "left_out": dict(self.left_out),
            "growth": {str(target): one.json() for target, one in self.growth.items()},
            "each": [cost.json() for cost in self.costs],
        }


def fault_rows(costs: Sequence[Cost]) -> list[tuple[str, ...]]:
    """Return a row for each kind of fault and role that was hit, in the order of ``COLUMNS``."""
    rows = []
    for name in KINDS:
        for role in sorted({cost.fault.target.role for cost in costs if cost.fault.kind.name == name}):
            these = [cost for cost in costs if (cost.fault.kind.name, cost.fault.target.role) == (name, role)]
            rows.append(
                (
                    f"{name} {role}",
                    str(len(these)),
                    _seconds(these, "detected_seconds", 0.5),
                    *(
                        _seconds(these, f"{figure}_seconds", share)
                        for figure in ("next_commit", "commit_gap", "recovered")
                        for share in (0.5, 1.0)
                    ),
                    str(sum(cost.discarded for cost in these)),
                    str(sum(len(cost.lost) for cost in these)),
                )
            )
    return rows


def growth_rows(growth: Mapping[Target, Growth]) -> list[tuple[str, ...]]:
    """Return a row for each target, in the order of ``GROWTH_COLUMNS``."""
    return [
        (
            str(target),
            str(one.processes),
            f"{one.seconds:.0f} s",
            f"{one.resident_bytes / 2**20:.0f} MiB",
            f"{one.bytes_per_minute / 2**20:+.2f} MiB/min",
            str(one.descriptors),
            f"{one.descriptors_per_minute:+.2f}/min",
        )
        for target, one in sorted(growth.items())
    ]


def summary(outcome: Outcome) -> list[str]:
    """Return the lines below the tables."""
    facts = outcome.json()
    rate = f"{facts['faults_per_minute']} a minute"
    lines = [f"{facts['faults']} faults in {outcome.seconds:.0f} s ({rate}), {facts['not_injected']} not injected"]
    lines.append(
        f"{outcome.commits} steps committed ({facts['commits_per_second']} a second), {facts['discarded']} discarded, "
        f"{facts['retried']} retried, {facts['false_evictions']} false evictions"
    )
    samples = "not known, pass --samples-per-step" if outcome.lost_samples is None else f"{outcome.lost_samples:,}"
    goodput = "not known without step logs" if outcome.goodput is None else f"{outcome.goodput:.1%}"
    lines.append(f"goodput: {goodput}; committed steps lost: {outcome.lost_steps}; samples lost: {samples}")
    if outcome.checked_steps is None:
        lines.append("history: not checked, because no logs were found; pass --logs")
    else:
        lines.append(f"history: {len(outcome.violations)} violations in {outcome.checked_steps} steps")
    lines.append(
        f"weights: {outcome.compared_weights} digests compared, {outcome.comparisons} comparisons by the lighthouse"
    )
    lines += [f"recovery of {target} not seen: this machine cannot reach it" for target in outcome.unseen]
    broken = outcome.broken()
    return [*lines, *(f"BROKEN: {one}" for one in broken)] if broken else [*lines, "no promise was broken"]


def markdown(outcome: Outcome, job: str) -> str:
    """Return the figures of ``results.json``, except those of each fault, as a page of Markdown."""
    verdict = "A promise was broken" if outcome.broken() else "No promise was broken"
    parts = [
        f"# Faults in job {job}",
        f"{verdict}. Seed {outcome.seed}. `results.json` has the times of each fault.",
        "\n".join(f"* {line}" for line in summary(outcome)),
        "## Faults",
        _table(COLUMNS, fault_rows(outcome.injected)),
    ]
    if rows := growth_rows(outcome.growth):
        parts += ["## Processes", _table(GROWTH_COLUMNS, rows)]
    if outcome.left_out:
        parts += ["## Kinds that were left out", _table(("kind", "reason"), outcome.left_out.items())]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _seconds(costs: Sequence[Cost], figure: str, share: float) -> str:
    """Return the median (``share`` 0.5) or the largest of a figure; a dash: none of the faults has it."""
    values = [value for cost in costs if (value := getattr(cost, figure)) is not None]
    if not values:
        return "-"
    return f"{median(values) if share == 0.5 else max(values):.2f} s"
