"""The result of a run: its figures, the promises that were broken, and the tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from keepstep_cli.chaos.recovery import Cost
from keepstep_cli.chaos.resources import Growth
from keepstep_cli.chaos.vocabulary import KINDS, Target

COLUMNS = ("fault", "number", "next commit p50", "p95", "max", "recovered p50", "max", "discarded", "false evictions")
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

    @property
    def injected(self) -> list[Cost]:
        return [cost for cost in self.costs if not cost.failed]

    def broken(self) -> list[str]:
        """Return the promises that were broken, as sentences."""
        found = ["the job is wedged: no step committed although enough groups were able to"] if self.wedged else []
        found += [f"{target} did not recover" for target in self.unrecovered]
        found += [f"history: {one}" for one in self.violations]
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
            "discarded": sum(cost.discarded for cost in self.costs),
            "retried": sum(cost.retried for cost in self.costs),
            "false_evictions": sum(len(cost.lost) for cost in self.costs),
            "wedged": self.wedged,
            "checked_steps": self.checked_steps,
            "violations": list(self.violations),
            "compared_weights": self.compared_weights,
            "comparisons": self.comparisons,
            "broken": self.broken(),
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
            gaps = sorted(cost.next_commit_seconds for cost in these if cost.next_commit_seconds is not None)
            back = sorted(cost.recovered_seconds for cost in these if cost.recovered_seconds is not None)
            rows.append(
                (
                    f"{name} {role}",
                    str(len(these)),
                    *(_seconds(gaps, share) for share in (0.5, 0.95, 1.0)),
                    *(_seconds(back, share) for share in (0.5, 1.0)),
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
    if outcome.checked_steps is None:
        lines.append("history: not checked, because no logs were found; pass --logs")
    else:
        lines.append(f"history: {len(outcome.violations)} violations in {outcome.checked_steps} steps")
    lines.append(
        f"weights: {outcome.compared_weights} digests compared, {outcome.comparisons} comparisons by the lighthouse"
    )
    broken = outcome.broken()
    return [*lines, *(f"BROKEN: {one}" for one in broken)] if broken else [*lines, "no promise was broken"]


def _seconds(ordered: Sequence[float], share: float) -> str:
    if not ordered:
        return "none"
    value = median(ordered) if share == 0.5 else ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return f"{value:.2f} s"
