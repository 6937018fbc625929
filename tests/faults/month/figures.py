"""Figures of a service at the end of each day of the month, and the limits that they must keep."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

SETTLED = 0.3
"""Share of the month after which memory must not grow: what has a limit by count or age has reached it."""


@dataclass(slots=True)
class Figures:
    """``limits``: largest value allowed at any time, by name. Names without a limit are only shown."""

    limits: dict[str, float]
    memory_growth: float = 1.1
    """Largest ratio of the memory at the end to that at ``SETTLED``."""
    rows: list[dict[str, float]] = field(default_factory=list)

    def add(self, day: float, **values: float) -> None:
        gc.collect()
        self.rows.append({"day": day, **values, "python_blocks": sys.getallocatedblocks(), "rss_mib": rss_mib()})

    def broken(self) -> list[str]:
        """Return a sentence for each limit that did not hold."""
        found = []
        for name, limit in self.limits.items():
            most = max(row[name] for row in self.rows)
            if most > limit:
                found.append(f"{name}: {most:,.0f} (limit {limit:,.0f})")
        settled, last = self.rows[int(len(self.rows) * SETTLED)], self.rows[-1]
        growth = last["python_blocks"] / settled["python_blocks"]
        if growth > self.memory_growth:
            found.append(f"python_blocks grew {growth:.2f} times after day {settled['day']:g}")
        return found

    def table(self) -> str:
        names = list(self.rows[-1])
        shown = [self.rows[int(len(self.rows) * part)] for part in (0, SETTLED, 0.6)] + [self.rows[-1]]
        heads = " | ".join(f"day {row['day']:.0f}" for row in shown)
        lines = [f"| | {heads} | most | limit |", "|---|" + "---|" * (len(shown) + 2)]
        for name in names[1:]:
            cells = [f"{row[name]:,.0f}" for row in shown]
            most, limit = max(row[name] for row in self.rows), self.limits.get(name)
            lines.append(f"| {name} | {' | '.join(cells)} | {most:,.0f} | {'' if limit is None else f'{limit:,.0f}'} |")
        return "\n".join(lines)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def lines_of(registry: CollectorRegistry) -> int:
    return generate_latest(registry).count(b"\n")


def files_in(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def bytes_of(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def folders_in(folder: Path) -> int:
    return sum(path.is_dir() for path in folder.rglob("*"))
