"""Measure keepstep beside torchft in one run, print a table, and write ``.bench/results.json``.

make bench                                     everything
make bench BENCH="quorum kill --quick"         some of it, with fewer samples
make bench BENCH="--peer-python ~/torchft/bin/python"
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

import checkpoint_speed
import click
import durable
import failover
import goodput
import groups
import hangs
import heal
import heal_step
import hsdp_step
import join
import kill_to_commit
import loss
import machines
import one_copy
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
import way_back
from report import Done, machine, table, write
from rich.console import Console
from sides import WORK, keepstep_side, torchft_side

BENCHMARKS = {
    "quorum": quorum_round.run,
    "kill": kill_to_commit.run,
    "failover": failover.run,
    "way_back": way_back.run,
    "goodput": goodput.run,
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
    "durable": durable.run,
    "one_copy": one_copy.run,
    "scale": scale.run,
    "hangs": hangs.run,
    "machines": machines.run,
}
"""Without torchft: these need no environment of it."""


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
    done: dict[str, Done] = {}
    broken: list[str] = []
    for name in names or (*BENCHMARKS, *ALONE):
        began = time.monotonic()
        try:
            figures = (
                ALONE[name](quick=quick, log=log) if name in ALONE else BENCHMARKS[name](*sides, quick=quick, log=log)
            )
        except Exception:  # noqa: BLE001 - the others still run
            traceback.print_exc()
            broken.append(name)
            continue
        done[name] = Done(time.monotonic() - began, figures)
        print(f"{name}: {done[name].seconds:.0f} s", flush=True)
        path = write(done, facts, sides, quick=quick)
    if not done:
        sys.exit(f"no benchmark ended: {', '.join(broken)}")
    figures = [figure for one in done.values() for figure in one.figures]
    console = Console(width=None if os.isatty(1) else 140)
    console.print(table(figures))
    console.print(f"every sample: {path}; `python benchmarks/measured.py` writes the page of them")
    if failed := broken + [one.name for one in figures if one.must and one.reached() is False]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
