"""Measure keepstep beside torchft in one run, print a table, and write ``.bench/results.json``.

make bench                                     everything
make bench BENCH="quorum kill --quick"         some of it, with fewer samples
make bench BENCH="--peer-python ~/torchft/bin/python"
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
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
from sides import HERE, WORK, keepstep_side, torchft_side

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
LIMIT_SECONDS = 900
"""Of one benchmark. If it takes longer it has failed, and the others still run."""


def seconds_before(*, quick: bool) -> dict[str, int]:
    """Return what each benchmark took in its last run that is in ``measured.json``."""
    kept = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))
    return {name: run["seconds"] for name, run in kept.items() if run["quick"] == quick}


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after ``seconds``."""

    def over(*_: object) -> None:
        raise TimeoutError(f"not ended within {seconds} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


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
    facts, before = machine(), seconds_before(quick=quick)
    done: dict[str, Done] = {}
    broken: list[str] = []
    path, started = WORK / "results.json", time.monotonic()
    chosen = names or (*BENCHMARKS, *ALONE)
    for number, name in enumerate(chosen, 1):
        began = time.monotonic()
        expected = f"about {before[name]} s" if name in before else "not measured before"
        print(f"[{number} of {len(chosen)}] {name}: {expected}; {began - started:.0f} s so far", flush=True)
        try:
            with limited(LIMIT_SECONDS):
                figures = (
                    ALONE[name](quick=quick, log=log)
                    if name in ALONE
                    else BENCHMARKS[name](*sides, quick=quick, log=log)
                )
        except Exception:  # noqa: BLE001 - the others still run
            traceback.print_exc()
            broken.append(name)
            continue
        done[name] = Done(time.monotonic() - began, figures)
        print(f"{name}: {done[name].seconds:.0f} s", flush=True)
        write(path, done, facts, sides, quick=quick)
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
