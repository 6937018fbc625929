"""Write ``benchmarks/MEASURED.md``, and tables of README.md and ``docs``, from ``.bench/results.json``.

python benchmarks/measured.py [RESULTS]

The newest run of each benchmark is kept in ``benchmarks/measured.json``, without its samples, with the number of lines
of the code that it measures that have changed since. A run with ``--quick`` replaces only a run with ``--quick``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
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
BENCH = "again with `make bench`"


@dataclass(frozen=True)
class Shown:
    """A table of a page that this script writes."""

    page: str
    columns: tuple[str, ...]
    """The first has the texts of the rows. ``keepstep``, ``ratio``, ``target`` and ``BENCH`` have what they say.
    ``other`` has what was measured beside keepstep with its name, any other column without."""
    rows: tuple[tuple[str, str, str], ...]
    """Text, benchmark, and figure, or the beginning of its name."""

    def head(self) -> tuple[str, str]:
        return f"| {' | '.join(self.columns)} |".replace("|  |", "| |"), "|---" * len(self.columns) + "|"

    def lines(self, kept: dict[str, Any]) -> list[str]:
        """Return the lines of the table; a figure that was not measured has no row."""
        lines = list(self.head())
        for text, benchmark, start in self.rows:
            figures = kept.get(benchmark, {"figures": []})["figures"]
            found = [one for one in figures if one["name"] == start]
            for one in found or [one for one in figures if one["name"].startswith(start)][:1]:
                unit = one["unit"]
                cells = {
                    self.columns[0]: text,
                    "keepstep": f"{_number(one['keepstep'])} {unit}".strip(),
                    "ratio": "" if one["ratio"] is None else f"{one['ratio']:.2g}",
                    "target": _limit(one),
                    "other": f"{_named(one)} {unit}".strip() if _other(one) else "",
                    BENCH: f"`BENCH={benchmark}`",
                }
                theirs = f"{_other(one)} {unit}".strip() if _other(one) else ""
                lines.append(f"| {' | '.join(cells.get(column, theirs) for column in self.columns)} |")
        return lines

    def written(self, text: str, kept: dict[str, Any]) -> str:
        """Return the text of the page with these lines in the place of its table."""
        head = self.head()[0]
        text, tables = re.subn(re.escape(head) + r"\n(?:\|.*\n)*", lambda _: "\n".join(self.lines(kept)) + "\n", text)
        if tables != 1:
            raise ValueError(f"{self.page} has {tables} tables that begin with {head!r}, not 1")
        return text


SHOWN = (
    Shown("README.md", ("", "torchft", "keepstep", "ratio", BENCH), (
        ("goodput of 3 groups, one SIGKILL every 10 s", "goodput", "goodput, a failure every 10 s"),
        ("the same, one every 60 s; above 1 is noise", "goodput", "goodput, a failure every 60 s"),
        ("SIGKILL of 1 of 3 groups to the others' next commit", "kill", "SIGKILL to next commit"),
        ("the same, p95", "kill", "SIGKILL to next commit, p95"),
        ("the killed group's own next commit, restarted by `keepstep run`", "way_back", "way back, warm start"),
        ("SIGSTOP of one, worst (default heartbeat timeout: 5 s)", "kill", "SIGSTOP to next commit, max"),
        ("SIGKILL of the leading lighthouse: gap between commits, p95", "failover", "SIGKILL to the leading"),
        ("quorum round, 1 group", "quorum", "quorum round, N=1, steady"),
        ("8 groups", "quorum", "quorum round, N=8, steady"),
        ("64 groups", "quorum", "quorum round, N=64, steady"),
        ("256 groups", "quorum", "quorum round, N=256, steady"),
        ("1,024 groups", "quorum", "quorum round, N=1024, steady"),
        ("added to a step of plain DDP, tiny model", "step", "step, tiny model, added to"),
        ("added to a step of plain DDP, 2.1 M parameters", "step", "step, 2.1 M parameters, added to"),
        ("1 GiB of live state to a joiner, direct, verified (torchft: unverified)", "heal", "heal 1 GiB, direct"),
        ("the same through the relay", "heal", "heal 1 GiB, through the relay"),
        ("128 MiB to 8 joiners at once, 1 Gbit/s each", "swarm", "8 joiners behind 1gbit/s each, 128 MiB"),
        ("1 GiB to one joiner over 1 Gbit/s: longest step of the others", "join", "a third group joins"),
        ("[a model that exists once](docs/one-copy.md), 64 MB: SIGKILL of a rank to the next commit (other: torchrun)",
         "one_copy", "SIGKILL of 1 of 4 ranks to the next commit of all, 64 MB of state, with a spare"),
    )),
    Shown("docs/training.md", ("state of a joiner", "torchft", "keepstep", "ratio", BENCH), (
        ("1 GiB within one machine, through a relay: the whole stall of steps",
         "heal_step", "a third group joins with 1024 MiB: the one stall"),
        ("128 MiB from host to host at 1 Gbit/s: the transfer", "swarm", "the same, one joiner"),
        ("the same, eight joiners at once", "swarm", "8 joiners behind 1gbit/s each, 128 MiB"),
    )),
    Shown("docs/scaling.md", ("1,024 groups", "keepstep", "target"), tuple(
        (text, "scale", f"1024 groups: {start}")
        for text, start in (
            ("first quorum, all members new", "first quorum"),
            ("answers of one quorum, first to last, p50", "answers of one quorum"),
            ("SIGKILL of a group until the last group has an answer without it", "SIGKILL of a group"),
            ("a group joins: first to last answer with it", "a group joins"),
            ("SIGKILL of the leader until the last group has an answer of the next one", "SIGKILL of the leader"),
            ("processor time of the next leader for it, and for 8 s of steps around it", "the same, processor"),
            ("longest answer of the metrics service's event loop", "longest answer"),
            ("memory of the leader", "memory, leader"),
            ("memory of the metrics service", "memory, metrics"),
        )
    )),
    Shown("docs/torch-checkpoint.md", ("1 GiB", "other", "keepstep", "ratio"), tuple(
        (f"{text}, {ranks}", "checkpoint", f"{start} of 1024 MiB on {ranks}{end}")
        for text, start, end in (
            ("save", "save", ""),
            ("save, `sync=False`", "save", ", not synced"),
            ("save through a relay with a disk", "save", ", through a relay"),
            ("load", "load", ""),
            ("load through a relay", "load", ", through a relay"),
            ("training blocked by a background save", "training blocked by a background save", ""),
        )
        for ranks in ("1 rank", "2 ranks")
    )),
    Shown("docs/sharded.md", ("two ranks", "Megatron Core", "keepstep", "ratio"), tuple(
        (f"{text}{form}", "sharded", f"{start} on 2 ranks, keepstep{form.replace('`', '')}")
        for form in ("", ", `torch_dist`")
        for text, start in (
            ("save of 1 GiB", "sharded save of 1024 MiB"),
            ("load of 1 GiB", "sharded load of 1024 MiB"),
            ("plan of 5,000 tensors", "plan of 5,000 sharded tensors"),
            ("save of 5,000 tensors", "save of 5,000 sharded tensors"),
            ("load of 5,000 tensors", "load of 5,000 sharded tensors"),
        )
    )),
)  # fmt: skip
KEYS = ("name", "unit", "statistic", "keepstep", "other", "beside", "ratio", "limits", "more_is_better", "reached")
"""Values of a figure that are kept."""
HEAD = """# Measured

`python benchmarks/measured.py` writes this page from the results of `make bench`; [README.md](README.md) defines each
row. The value is one statistic of all samples; `of 15 / 5`: 15 of keepstep, 5 of the other side. `other` is the value
of what was measured beside keepstep in the same run, with its name; `ratio` is keepstep's value divided by it.
"""


def git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def changed_lines(commit: str, folders: tuple[str, ...], root: Path = ROOT) -> int | None:
    """Return the added and removed lines of Python between ``commit`` and the tree; None: no such commit exists."""
    known = ["git", "cat-file", "-e", f"{commit.rstrip('+')}^{{commit}}"]
    if subprocess.run(known, cwd=root, capture_output=True, check=False).returncode:
        return None
    lines = git("diff", "--numstat", commit.rstrip("+"), "--", *(f"{one}/**.py" for one in folders), root=root)
    return sum(int(number) for line in lines.splitlines() for number in line.split("\t")[:2])


def _kept(figure: dict[str, Any]) -> dict[str, Any]:
    """Return a figure with the numbers of its samples in place of them."""
    ours, theirs = (len(figure["samples"][side]) for side in ("keepstep", "other"))
    return {
        **{key: figure[key] for key in (*KEYS, *(["restart"] if "restart" in figure else []))},
        "samples": ours or theirs,
        **({"other_samples": theirs} if ours and theirs and ours != theirs else {}),
    }


def merged(kept: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the benchmarks that were kept, with those of ``results`` in their places."""
    run = {key: results[key] for key in ("when", "commit", "quick", "machine", "versions")}
    new = {}
    for name, found in results["benchmarks"].items():
        if run["quick"] and name in kept and not kept[name]["quick"]:
            continue
        figures = [_kept(one) for one in found["figures"]]
        new[name] = {**run, "seconds": found["seconds"], "figures": figures}
    return {**kept, **new}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _other(figure: dict[str, Any]) -> str:
    value, restart = _number(figure["other"]), figure.get("restart")  # goodput has a third side
    return value if restart is None else f"{value}; torchrun and DCP {_number(restart)}"


def _named(figure: dict[str, Any]) -> str:
    return f"{figure['beside']}: {_other(figure)}" if figure["other"] is not None else ""


def _limit(figure: dict[str, Any]) -> str:
    sign, hardest = (">=", max) if figure["more_is_better"] else ("<=", min)
    limit = hardest(figure["limits"], default=None)
    reached = {True: "reached", False: "missed", None: ""}[figure["reached"]]
    return "" if limit is None else f"{sign} {_number(limit)} {reached}".rstrip()


def _row(figure: dict[str, Any]) -> str:
    theirs = figure.get("other_samples")
    count = f"{figure['samples']}{f' / {theirs}' if theirs else ''}"
    cells = (
        figure["name"],
        f"{figure['unit']} {figure['statistic']} of {count}".strip(),
        _number(figure["keepstep"]),
        _named(figure),
        _number(figure["ratio"]),
        _limit(figure),
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
        if run["changed_lines"] is None:
            told += " **Of a commit that is not in this repository:** the code that it measures may be newer."
        elif run["changed_lines"]:
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
        if run["changed_lines"] != 0:
            lines = "unknown" if run["changed_lines"] is None else f"{run['changed_lines']:,}"
            print(f"{name}: lines of what it measures that have changed since {run['when'][:10]}: {lines}")
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")
    for one in SHOWN:
        path = ROOT / one.page
        path.write_text(one.written(path.read_text(encoding="utf-8"), kept), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".bench" / "results.json")
