"""Run simulations by their seeds: ``python -m tests.simulation.run --seeds 100000 [--lighthouses N] [--finish]
[--catch-up] [--ports] [--retry] [--spares] [--trouble]``.

Prints a line of progress and, for each seed that fails, the broken rule, the fewest faults that still break it, and
the trace. Exit code 1 when a seed failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from functools import partial
from typing import TypedDict, Unpack

from tests.simulation.checks.violation import Violation
from tests.simulation.faults.drawing import Fault
from tests.simulation.simulation import Simulation

MAX_REPORTED = 5
FIRST_LINES, LAST_LINES = 300, 50


class Modes(TypedDict, total=False):
    """Arguments of ``Simulation`` that choose what is simulated."""

    finishes: bool
    catches_up: bool
    ports: bool
    retries: bool
    spares: bool
    troubles: bool


def violation(
    seed: int,
    faults: tuple[Fault, ...] | None = None,
    *,
    lighthouses: int | None = None,
    careful: bool = False,
    **modes: Unpack[Modes],
) -> str | None:
    """The rule that this seed breaks, if any.

    Args:
        seed, faults, careful: See ``Simulation``.
        lighthouses: Their number; None: drawn from the seed.
        modes: As in ``Simulation``.
    """
    try:
        Simulation(seed, faults, lighthouses=lighthouses, careful=careful, **modes).run()
    except Violation as error:
        return str(error)
    return None


def minimal_faults(seed: int, lighthouses: int | None = None, **modes: Unpack[Modes]) -> tuple[Fault, ...]:
    """Faults of a failing seed of which none can be left out."""
    left = list(Simulation(seed, lighthouses=lighthouses, **modes).faults)
    for fault in list(left):
        fewer = tuple(one for one in left if one is not fault)
        if violation(seed, fewer, lighthouses=lighthouses, careful=True, **modes) is not None:
            left.remove(fault)
    return tuple(left)


def explain(seed: int, lighthouses: int | None = None, **modes: Unpack[Modes]) -> str:
    """A report on a failing seed."""
    faults = minimal_faults(seed, lighthouses, **modes)
    simulation = Simulation(seed, faults, lighthouses=lighthouses, careful=True, **modes)
    simulation.tracing = True
    try:
        simulation.run()
        what = "no violation when the core is validated after each event"
    except Violation as error:
        what = str(error)
    listed = "\n".join(f"    {fault}" for fault in faults) or "    none"
    lines = simulation.trace
    if len(lines) > FIRST_LINES + LAST_LINES:
        lines = [*lines[:FIRST_LINES], "...", *lines[-LAST_LINES:]]
    trace = "\n".join(f"    {line}" for line in lines)
    policy = simulation.policy
    about = (
        f"{len(simulation.names)} groups, {len(simulation.nodes)} lighthouses, "
        f"min_replicas {policy.min_replicas}, max_replicas {policy.max_replicas}"
    )
    return f"seed {seed}: {what}\n  {about}; faults:\n{listed}\n  trace:\n{trace}"


def run(seeds: range, jobs: int, lighthouses: int | None, **modes: Unpack[Modes]) -> int:
    """Run all ``seeds``. Returns the number of seeds that failed."""
    failed: list[int] = []
    began = time.monotonic()
    every = max(100, len(seeds) // 100)
    with multiprocessing.Pool(jobs) as pool:
        results = pool.imap_unordered(partial(_run_one, lighthouses, modes), seeds, chunksize=32)
        for number, (seed, what) in enumerate(results, 1):
            if what is not None:
                failed.append(seed)
                print(f"\nseed {seed}: {what}")
                if len(failed) <= MAX_REPORTED:
                    print(explain(seed, lighthouses, **modes))
            if number % every == 0 or number == len(seeds):
                rate = number / (time.monotonic() - began)
                line = f"{number}/{len(seeds)} seeds, {rate:.0f}/s, {len(failed)} failed"
                print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    print()
    return len(failed)


def _run_one(lighthouses: int | None, modes: Modes, seed: int) -> tuple[int, str | None]:
    return seed, violation(seed, lighthouses=lighthouses, **modes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--start", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument(
        "--lighthouses", type=int, choices=(1, 2, 3), help="their number (default: drawn from each seed)"
    )
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="number of processes")
    parser.add_argument("--finish", action="store_true", help="let the groups take a last step and finish together")
    parser.add_argument("--catch-up", action="store_true", help="let groups that are behind follow, in all seeds")
    parser.add_argument("--ports", action="store_true", help="let the lighthouses look at the ports of suspects")
    parser.add_argument("--retry", action="store_true", help="let the groups retry steps in which a member is lost")
    parser.add_argument("--spares", action="store_true", help="let spares stand by, and replace groups")
    parser.add_argument("--trouble", action="store_true", help="let groups keep others from committing, and complain")
    arguments = parser.parse_args()
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    modes: Modes = {
        "finishes": arguments.finish,
        "ports": arguments.ports,
        "retries": arguments.retry,
        "spares": arguments.spares,
        "troubles": arguments.trouble,
    }
    if arguments.catch_up:
        modes["catches_up"] = True
    return 1 if run(seeds, arguments.jobs, arguments.lighthouses, **modes) else 0


if __name__ == "__main__":
    sys.exit(main())
