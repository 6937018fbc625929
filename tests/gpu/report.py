"""The report of a run: a table for the terminal, gpu-report.json, and docs/gpus.md."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.check import Outcome
from tests.gpu.machine import Machine

FIGURES = "## Figures"
"""Heading in docs/gpus.md; a run replaces everything below it."""


def lines_of(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Yield the lines of a table for the terminal; below a failed check, the reason."""
    wide = max((len(one.name) for one in outcomes), default=0)
    for one in outcomes:
        seconds = f"{one.seconds:6.1f} s" if one.seconds else " " * 8
        detail = f"({one.reason})" if one.state == "skipped" else _figures(one.figures)
        yield f"{one.name:{wide}}  {one.state:7} {seconds}  {detail}".rstrip()
        if one.state == "failed":
            yield from (f"    {line}" for line in one.reason.splitlines())


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return ``15 passed, 1 failed, 2 skipped``."""
    counts = {state: sum(one.state == state for one in outcomes) for state in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def write_json(path: Path, machine: Machine, device: str, outcomes: Sequence[Outcome]) -> None:
    record: dict[str, Any] = {
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": device,
        "machine": asdict(machine),
        "checks": [asdict(one) for one in outcomes],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_page(path: Path, machine: Machine, outcomes: Sequence[Outcome]) -> None:
    """Write the figures of docs/gpus.md, with the machine on which they were measured. Keep the text before them."""
    before, _, _ = path.read_text(encoding="utf-8").partition(FIGURES) if path.exists() else ("", "", "")
    rows = [f"| {name} | {value} |" for name, value in machine.rows()]
    checks = [f"| `{one.name}` | {one.what} | {one.state} | {_figures(one.figures)} |" for one in outcomes]
    failed = [f"* `{one.name}`: {one.reason.splitlines()[0]}" for one in outcomes if one.state == "failed"]
    today = dt.datetime.now(dt.UTC).date().isoformat()
    parts = [
        f"{before}{FIGURES}",
        f"`make gpu` wrote this part on {today}: {summary(outcomes)}.",
        "",
        "| machine | |",
        "|---|---|",
        *rows,
        "",
        "| check | what it shows | result | figures |",
        "|---|---|---|---|",
        *checks,
        "",
    ]
    if failed:
        parts += ["### Failed", *failed, ""]
    path.write_text("\n".join(parts), encoding="utf-8")


def _figures(figures: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in figures.items())
