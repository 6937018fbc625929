"""Write ``benchmarks/MEASURED.md`` from ``.bench/results.json``: ``python benchmarks/measured.py [RESULTS]``.

The newest run of each benchmark is kept in ``benchmarks/measured.json``, without its samples, with the number of lines
of the code that it measures that have changed since. A run with ``--quick`` replaces only a run with ``--quick``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "measured.json"
PAGE = ROOT / "benchmarks" / "MEASURED.md"
SERVICES = ("libs/keepstep_mesh", "services/keepstep_lighthouse")
TRAINING = ("libs/keepstep", *SERVICES)
RELAY = (*TRAINING, "services/keepstep_relay")
MEASURES = {
    "quorum": SERVICES,
    "failover": SERVICES,
    "scale": (*SERVICES, "services/keepstep_metrics"),
    **dict.fromkeys(("way_back", "goodput", "hangs"), (*TRAINING, "libs/keepstep_cli")),
    **dict.fromkeys(("transfer", "heal", "swarm", "heal_step", "join", "checkpoint", "relay", "durable"), RELAY),
    "sharded": ("libs/keepstep", "libs/keepstep_formats", "libs/keepstep_megatron"),
}
"""Folders that a benchmark measures; of all others ``TRAINING``."""
HEAD = """# Measured

`python benchmarks/measured.py` writes this page from the results of `make bench`; [README.md](README.md) defines each
row. The value is one statistic of all samples. `other` is the peer of the definition, in the same run; `ratio` is
keepstep's value divided by it.
"""


def git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def changed_lines(commit: str, folders: tuple[str, ...], root: Path = ROOT) -> int:
    """Return the added and removed lines of Python between ``commit`` and the tree."""
    lines = git("diff", "--numstat", commit.rstrip("+"), "--", *(f"{one}/**.py" for one in folders), root=root)
    return sum(int(number) for line in lines.splitlines() for number in line.split("\t")[:2])


def merged(kept: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the benchmarks that were kept, with those of ``results`` in their places."""
    run = {key: results[key] for key in ("when", "commit", "quick", "machine", "versions")}
    new = {}
    for name, found in results["benchmarks"].items():
        if run["quick"] and name in kept and not kept[name]["quick"]:
            continue
        keys = ("name", "unit", "statistic", "keepstep", "torchft", "ratio", "limits", "more_is_better", "reached")
        figures = [
            {**{key: one[key] for key in keys}, "samples": max(map(len, one["samples"].values()))}
            for one in found["figures"]
        ]
        new[name] = {**run, "seconds": found["seconds"], "figures": figures}
    return {**kept, **new}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _row(figure: dict[str, Any]) -> str:
    sign, hardest = (">=", max) if figure["more_is_better"] else ("<=", min)
    limit = hardest(figure["limits"], default=None)
    reached = {True: "reached", False: "missed", None: ""}[figure["reached"]]
    cells = (
        figure["name"],
        f"{figure['unit']} {figure['statistic']} of {figure['samples']}".strip(),
        _number(figure["keepstep"]),
        _number(figure["torchft"]),
        _number(figure["ratio"]),
        "" if limit is None else f"{sign} {_number(limit)} {reached}".rstrip(),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(kept: dict[str, Any]) -> str:
    """Return the page."""
    parts = [HEAD]
    for name, run in kept.items():
        versions = ", ".join(f"{who} {what}" for who, what in run["versions"].items())
        machine = run["machine"]
        told = (
            f"{run['when'][:10]}, commit {run['commit']}, {run['seconds']} s"
            f"{', `--quick`' if run['quick'] else ''}; {machine['processor']}, {machine['cores']} cores, "
            f"load {machine['load_before']:.1f} before it, Python {machine['python']}; {versions}."
        )
        if run["changed_lines"]:
            told += f" **Older than the code:** {run['changed_lines']:,} lines of what it measures have changed since."
        table = ["| figure | unit | keepstep | other | ratio | target |", "|---|---|---|---|---|---|"]
        parts.append("\n".join((f"## {name}", *wrapped(told), "", *table, *map(_row, run["figures"]))) + "\n")
    return "\n".join(parts)


def wrapped(text: str, width: int = 120) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def main(results: Path) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if results.exists():
        kept = merged(kept, json.loads(results.read_text(encoding="utf-8")))
    for name, run in kept.items():
        run["changed_lines"] = changed_lines(run["commit"], MEASURES.get(name, TRAINING))
        if run["changed_lines"]:
            print(f"{name}: {run['changed_lines']:,} lines of what it measures have changed since {run['when'][:10]}")
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".bench" / "results.json")
