"""Runs simulations by their seeds: ``python -m tests.simulation.run --seeds 100000 [--lighthouses 2]``.

With one lighthouse it is its core in a shell of the simulator's, with two (or three) the real shell and the election.

Prints a line of progress, and for each seed that fails what was violated, the fewest faults that still do it, and what
happened. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from functools import partial

from tests.simulation import failover_faults, faults
from tests.simulation.failover import Failover
from tests.simulation.faults import Fault
from tests.simulation.simulator import Simulation
from tests.simulation.training import Training, Violation

MAX_REPORTED = 5
FIRST_LINES, LAST_LINES = 300, 50


def simulation_of(
    seed: int, faults: tuple[Fault, ...] | None = None, *, lighthouses: int = 1, careful: bool = False
) -> Training:
    return (Simulation if lighthouses == 1 else Failover)(seed, faults, careful=careful)


def violation(
    seed: int, faults: tuple[Fault, ...] | None = None, *, lighthouses: int = 1, careful: bool = False
) -> str | None:
    """What went wrong with this seed; None: nothing."""
    try:
        simulation_of(seed, faults, lighthouses=lighthouses, careful=careful).run()
    except Violation as error:
        return str(error)
    return None


def minimal_faults(seed: int, lighthouses: int) -> tuple[Fault, ...]:
    """Faults of a failing seed of which none can be left out."""
    left = list((faults if lighthouses == 1 else failover_faults).faults_of(seed))
    for fault in list(left):
        fewer = tuple(one for one in left if one is not fault)
        if violation(seed, fewer, lighthouses=lighthouses, careful=True) is not None:
            left.remove(fault)
    return tuple(left)


def explain(seed: int, lighthouses: int = 1) -> str:
    """A report on a failing seed."""
    faults = minimal_faults(seed, lighthouses)
    simulation = simulation_of(seed, faults, lighthouses=lighthouses, careful=True)
    simulation.tracing = True
    try:
        simulation.run()
        what = "nothing, when its core is validated after each event"
    except Violation as error:
        what = str(error)
    told = "\n".join(f"    {fault}" for fault in faults) or "    none"
    lines = simulation.trace
    if len(lines) > FIRST_LINES + LAST_LINES:
        lines = [*lines[:FIRST_LINES], "...", *lines[-LAST_LINES:]]
    trace = "\n".join(f"    {line}" for line in lines)
    policy = simulation.policy
    about = f"{len(simulation.names)} groups, min_replicas {policy.min_replicas}, max_replicas {policy.max_replicas}"
    return f"seed {seed}: {what}\n  {about}; faults:\n{told}\n  what happened:\n{trace}"


def run(seeds: range, jobs: int, lighthouses: int) -> int:
    """Number of seeds that failed."""
    failed: list[int] = []
    began = time.monotonic()
    every = max(100, len(seeds) // 100)
    with multiprocessing.Pool(jobs) as pool:
        results = pool.imap_unordered(partial(_one, lighthouses), seeds, chunksize=32)
        for number, (seed, what) in enumerate(results, 1):
            if what is not None:
                failed.append(seed)
                print(f"\nseed {seed}: {what}")
                if len(failed) <= MAX_REPORTED:
                    print(explain(seed, lighthouses))
            if number % every == 0 or number == len(seeds):
                rate = number / (time.monotonic() - began)
                kind = "one lighthouse" if lighthouses == 1 else "failover"
                line = f"{kind}: {number}/{len(seeds)} seeds, {rate:.0f}/s, {len(failed)} failed"
                print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    print()
    return len(failed)


def _one(lighthouses: int, seed: int) -> tuple[int, str | None]:
    return seed, violation(seed, lighthouses=lighthouses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first")
    parser.add_argument("--lighthouses", type=int, choices=(1, 2), default=1, help="one, or several with a store")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes")
    arguments = parser.parse_args()
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    return 1 if run(seeds, arguments.jobs, arguments.lighthouses) else 0


if __name__ == "__main__":
    sys.exit(main())
