"""The report of a run: the machine, a table of the figures, and every sample as JSON."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from figures import Figure
from rich.table import Table
from sides import ROOT, Side


@dataclass(frozen=True)
class Done:
    """A benchmark that has run."""

    seconds: float
    figures: list[Figure]


def machine() -> dict[str, object]:
    def first(path: str, key: str) -> str:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")

    return {
        "processor": first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def table(figures: list[Figure]) -> Table:
    def shown(number: float | None) -> str:
        return "" if number is None else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"

    shape = Table(title="keepstep and what is beside it, same run")
    for column in ("figure", "unit", "keepstep", "other", "beside", "ratio", "target", "reached"):
        shape.add_column(column, justify="left" if column in ("figure", "unit", "beside", "reached") else "right")
    for figure in figures:
        sign = ">=" if figure.more_is_better else "<="
        limit = (
            max(figure.bounds()) if figure.more_is_better and figure.bounds() else min(figure.bounds(), default=None)
        )
        reached = {True: "[green]yes", False: "[red]no", None: ""}[figure.reached()]
        shape.add_row(
            figure.name,
            f"{figure.unit}, {figure.statistic}",
            shown(figure.value(figure.ours)),
            shown(figure.value(figure.theirs)),
            figure.beside if figure.theirs else "",
            shown(figure.ratio()),
            "" if limit is None else f"{sign} {shown(limit)}",
            reached,
        )
    return shape


def commit() -> str:
    """Return the commit of this tree, with ``+`` if files of it have changed; empty outside of git."""
    ask = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write(path: Path, done: dict[str, Done], facts: dict[str, object], sides: list[Side], *, quick: bool) -> None:
    """Write the results so far, in one move: a run that is cut keeps them."""
    record = {
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "quick": quick,
        "machine": facts,
        "versions": {side.name: side.version() for side in sides},
        "benchmarks": {
            name: {"seconds": round(one.seconds), "figures": [figure.record() for figure in one.figures]}
            for name, one in done.items()
        },
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
