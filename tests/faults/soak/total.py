"""Add up the results of several soaks: faults by kind, growth by role, and what was broken. Pure, except ``read``.

python -m tests.faults.soak --total
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep_chaos.observing.resources import Growth, joint
from keepstep_chaos.vocabulary import KINDS, Role

FLAT_BYTES_PER_MINUTE = 256 * 1024
FLAT_DESCRIPTORS_PER_MINUTE = 0.5
LEAST_WATCHED_SECONDS = 600.0
"""Processes of a role that were watched for a shorter time, all together, say nothing about growth."""
SERVICES = frozenset(Role) - {Role.GROUP, Role.JOB}


@dataclass(frozen=True, slots=True)
class Total:
    runs: Sequence[dict[str, Any]]
    """``results.json`` of each run."""

    @property
    def faults(self) -> int:
        return sum(run["faults"] for run in self.runs)

    @property
    def seconds(self) -> float:
        return sum(run["seconds"] for run in self.runs)

    def by_kind(self) -> dict[tuple[str, str], int]:
        """Return the number of faults by kind and role."""
        hit = [(one["kind"], one["role"]) for run in self.runs for one in run["each"] if not one["failed"]]
        return {(kind, str(role)): hit.count((kind, role)) for kind in KINDS for role in Role if (kind, role) in hit}

    def growth(self) -> dict[str, Growth]:
        """Return the growth of all processes by role."""
        found: dict[str, list[Growth]] = {}
        for run in self.runs:
            for target, one in run["growth"].items():
                found.setdefault(role_of(target), []).append(Growth(**one))
        return {role: joint(parts) for role, parts in sorted(found.items())}

    def growing(self) -> list[str]:
        """Return the roles whose processes grow, as sentences."""
        watched = [item for item in self.growth().items() if item[1].seconds >= LEAST_WATCHED_SECONDS]
        return [
            f"processes of role {role} grow: {one.bytes_per_minute / 2**20:+.2f} MiB and "
            f"{one.descriptors_per_minute:+.2f} descriptors a minute"
            for role, one in watched
            if one.bytes_per_minute > FLAT_BYTES_PER_MINUTE or one.descriptors_per_minute > FLAT_DESCRIPTORS_PER_MINUTE
        ]

    def broken(self) -> list[str]:
        """Return what was broken in any run, and which processes grow."""
        found = [f"{run['name']}: {one}" for run in self.runs for one in (*run["broken"], *run["soak_broken"])]
        return found + self.growing()


def role_of(target: str) -> str:
    """Return the role in the name of a target: only those of services have one."""
    role = target.partition(" ")[0]
    return role if role in SERVICES else str(Role.GROUP)


def read(folder: Path) -> Total:
    """Read all ``results.json`` below ``folder``. A run that did not reach its last check counts as broken."""
    runs = []
    for path in sorted(folder.rglob("results.json")):
        run = json.loads(path.read_text())
        run["name"] = str(path.parent.relative_to(folder))
        run.setdefault("soak_broken", ["the run ended before its last check"])
        runs.append({"samples": 0, **run})
    return Total(runs)


def table(rows: Iterable[Sequence[object]]) -> list[str]:
    """Return lines with aligned columns: the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(one.rjust(w) if n else one.ljust(w) for n, (one, w) in enumerate(zip(row, widths, strict=True)))
            for row in cells]  # fmt: skip


def lines(total: Total) -> list[str]:
    """Return the report."""
    if not total.runs:
        return ["no results; `make soak` stores them"]
    columns = ("run", "minutes", "faults", "a minute", "commits", "samples", "weights", "violations", "wedged")
    runs = [
        (
            run["name"],
            f"{run['seconds'] / 60:.1f}",
            run["faults"],
            run["faults_per_minute"],
            run["commits"],
            run["samples"],
            run["compared_weights"],
            len(run["violations"]),
            "yes" if run["wedged"] else "no",
        )
        for run in total.runs
    ]
    kinds = [(f"{kind} {role}", number) for (kind, role), number in total.by_kind().items()]
    growth = [
        (
            role,
            one.processes,
            f"{one.seconds / 60:.1f}",
            f"{one.resident_bytes / 2**20:.0f} MiB",
            f"{one.bytes_per_minute / 2**20:+.3f} MiB/min",
            one.descriptors,
            f"{one.descriptors_per_minute:+.2f}/min" + ("" if one.seconds >= LEAST_WATCHED_SECONDS else " (too short)"),
        )
        for role, one in total.growth().items()
    ]
    heads = ("role", "processes", "minutes", "memory", "growth", "descriptors", "growth")
    longest = max(run["seconds"] for run in total.runs) / 60
    broken = total.broken()
    return [
        *table([columns, *runs]),
        "",
        *table([("fault", "number"), *kinds]),
        "",
        *(table([heads, *growth]) if growth else []),
        "",
        f"{total.faults} faults in {len(runs)} runs of {total.seconds / 60:.0f} minutes, the longest of {longest:.0f}",
        *([f"BROKEN: {one}" for one in broken] or ["no promise was broken"]),
    ]
