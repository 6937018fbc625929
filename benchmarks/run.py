"""Measure keepstep beside torchft in one run, print a table, and write ``.bench/results.json``.

make bench                                     everything (about 25 minutes)
make bench BENCH="quorum kill --quick"         some of it, with fewer samples
make bench BENCH="--peer-python ~/torchft/bin/python"
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import signal
import sys
from pathlib import Path

import checkpoint_speed
import click
import failover
import groups
import heal
import heal_step
import hsdp_step
import join
import kill_to_commit
import loss
import outer_step
import quantized
import quorum_round
import rank_step
import rebuild
import relay_processes
import scale
import sharded_speed
import step_cost
import swarm
import transfer
from figures import Figure
from rich.console import Console
from rich.table import Table
from sides import WORK, Side, keepstep_side, torchft_side

BENCHMARKS = {
    "quorum": quorum_round.run,
    "kill": kill_to_commit.run,
    "failover": failover.run,
    "step": step_cost.run,
    "hsdp": hsdp_step.run,
    "outer": outer_step.run,
    "transfer": transfer.run,
    "heal": heal.run,
    "swarm": swarm.run,
    "heal_step": heal_step.run,
    "join": join.run,
    "groups": groups.run,
    "checkpoint": checkpoint_speed.run,
}
ALONE = {
    "relay": relay_processes.run,
    "rank": rank_step.run,
    "rebuild": rebuild.run,
    "quantized": quantized.run,
    "loss": loss.run,
    "sharded": sharded_speed.run,
    "scale": scale.run,
}
"""Without torchft: these need no environment of it."""


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

    shape = Table(title="keepstep beside torchft, same run")
    for column in ("figure", "unit", "keepstep", "torchft", "ratio", "target", "reached"):
        shape.add_column(column, justify="left" if column in ("figure", "unit", "reached") else "right")
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
            shown(figure.ratio()),
            "" if limit is None else f"{sign} {shown(limit)}",
            reached,
        )
    return shape


def write(figures: list[Figure], facts: dict[str, object], sides: list[Side]) -> Path:
    path = WORK / "results.json"
    record = {
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "versions": {side.name: side.version() for side in sides},
        "figures": [figure.record() for figure in figures],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*BENCHMARKS, *ALONE]))
@click.option("--quick", is_flag=True, help="Fewer samples: a quick look, not a figure to quote.")
@click.option("--peer-python", type=click.Path(exists=True, path_type=Path), help="A Python that has torchft.")
def main(names: tuple[str, ...], *, quick: bool, peer_python: Path | None) -> None:
    """Run the benchmarks NAMES, or all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the processes that were started
    WORK.mkdir(exist_ok=True)
    log = WORK / "log.txt"
    log.write_text("")
    sides = [keepstep_side()]
    if not set(names) or set(names) - set(ALONE):
        sides.append(torchft_side(peer_python))
    facts = machine()
    figures: list[Figure] = []
    for name in names or (*BENCHMARKS, *ALONE):
        if name in ALONE:
            figures += ALONE[name](quick=quick, log=log)
        else:
            figures += BENCHMARKS[name](*sides, quick=quick, log=log)
        path = write(figures, facts, sides)
    console = Console(width=None if os.isatty(1) else 140)
    console.print(table(figures))
    console.print(f"every sample: {path}")


if __name__ == "__main__":
    main()
