"""The report of a run in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keepstep_chaos.verdict import COLUMNS, GROWTH_COLUMNS, Outcome, fault_rows, growth_rows, summary


def markdown(outcome: Outcome, job: str) -> str:
    """Return the figures of ``results.json``, except those of each fault, as a page of Markdown."""
    verdict = "A promise was broken" if outcome.broken() else "No promise was broken"
    parts = [
        f"# Faults in job {job}",
        f"{verdict}. Seed {outcome.seed}. `results.json` has the times of each fault.",
        "\n".join(f"* {line}" for line in summary(outcome)),
        "## Faults",
        table(COLUMNS, fault_rows(outcome.injected)),
    ]
    if rows := growth_rows(outcome.growth):
        parts += ["## Processes", table(GROWTH_COLUMNS, rows)]
    if outcome.left_out:
        parts += ["## Kinds that were left out", table(("kind", "reason"), outcome.left_out.items())]
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
