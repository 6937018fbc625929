"""Run simulations by their seeds: ``python -m tests.simulation.run --seeds 100000 [--lighthouses N] [--finish]
[--catch-up] [--ports] [--retry] [--spares] [--trouble] [--hangs] [--one-copy] [--every]``.

Prints a line of progress and, for each seed that fails, the broken rule, the fewest faults that still break it, and
the trace. Exit code 1 when a seed failed.

``--every`` runs the seeds of all simulators in ``SIMULATORS``, a block of each in turn. With ``--state FILE`` each
finished block is a line of JSON in FILE, and a later run leaves those blocks out: a long run may end at any time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack, cast

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
    hangs: bool
    one_copy: bool


SIMULATORS: dict[str, Modes] = {
    "plain": {},
    "finish": {"finishes": True},
    "catch-up": {"catches_up": True},
    "ports": {"ports": True},
    "retry": {"retries": True},
    "spares": {"spares": True},
    "trouble": {"troubles": True},
    "finish trouble": {"finishes": True, "troubles": True},
    "finish spares": {"finishes": True, "spares": True},
    "retry trouble": {"retries": True, "troubles": True},
    "hangs": {"hangs": True},
    "finish hangs": {"finishes": True, "hangs": True},
    "spares hangs": {"spares": True, "hangs": True},
    "retry hangs": {"retries": True, "hangs": True},
    "one copy": {"one_copy": True},
    "one copy spares": {"one_copy": True, "spares": True},
    "one copy finish": {"one_copy": True, "finishes": True},
}
"""All that ``--every`` runs, by name."""
BLOCK = 500
"""Seeds that one line of ``--state`` stands for."""


class Block(NamedTuple):
    """Seeds of one simulator. ``lighthouses``: their number; None: drawn from each seed."""

    simulator: str
    lighthouses: int | None
    start: int
    seeds: int


def blocks(simulators: Iterable[str], lighthouses: int | None, seeds: range) -> Iterator[Block]:
    """Yield the seeds of all simulators in blocks that begin at multiples of ``BLOCK``, one of each in turn."""
    start = seeds.start
    while start < seeds.stop:
        end = min(seeds.stop, (start // BLOCK + 1) * BLOCK)
        for name in simulators:
            yield Block(name, lighthouses, start, end - start)
        start = end


def finished(state: Path) -> set[Block]:
    """Return the blocks in ``state``; a line that a kill cut off is left out."""
    found = set()
    for line in state.read_text().splitlines() if state.exists() else ():
        try:
            found.add(Block(*json.loads(line)["block"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


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


def run(work: Iterable[Block], jobs: int, simulators: dict[str, Modes], state: Path | None = None) -> int:
    """Run all seeds of ``work``. Return the number of seeds that failed.

    Args:
        work: blocks of seeds.
        jobs: number of processes.
        simulators: arguments of ``Simulation``, by the name in the blocks.
        state: file of the finished blocks; gets each block that finishes.
    """
    done = finished(state) if state is not None else set()
    left = [block for block in work if block not in done]
    seeds, number, reported, failed = sum(block.seeds for block in left), 0, 0, 0
    began = time.monotonic()
    with ExitStack() as stack:
        pool = stack.enter_context(multiprocessing.Pool(jobs)) if jobs > 1 else None
        for block in left:
            modes, lighthouses = simulators[block.simulator], block.lighthouses
            wrong = []
            one, these = partial(_run_one, lighthouses, modes), range(block.start, block.start + block.seeds)
            for seed, what in map(one, these) if pool is None else pool.imap_unordered(one, these, chunksize=8):
                if what is not None:
                    wrong.append(seed)
                    print(f"\n{block.simulator}, seed {seed}: {what}")
                    reported += 1
                    if reported <= MAX_REPORTED:
                        print(explain(seed, lighthouses, **modes))
            number, failed = number + block.seeds, failed + len(wrong)
            if state is not None:
                with state.open("a") as file:
                    file.write(json.dumps({"block": block, "failed": sorted(wrong)}) + "\n")
            rate = number / (time.monotonic() - began)
            line = f"{number}/{seeds} seeds, {rate:.0f}/s, {failed} failed"
            print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    print()
    return failed


def _run_one(lighthouses: int | None, modes: Modes, seed: int) -> tuple[int, str | None]:
    return seed, violation(seed, lighthouses=lighthouses, **modes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--from", type=int, default=0, dest="start", help="first seed (default: 0)")
    parser.add_argument("--every", action="store_true", help="run these seeds of all simulators")
    parser.add_argument("--state", type=Path, help="file of finished blocks of seeds, which are left out")
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
    parser.add_argument("--hangs", action="store_true", help="let training threads of groups hang, or be slow")
    parser.add_argument("--one-copy", action="store_true", help="let the model exist once, in shards")
    arguments = parser.parse_args()
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    modes: Modes = {
        "finishes": arguments.finish,
        "ports": arguments.ports,
        "retries": arguments.retry,
        "spares": arguments.spares,
        "troubles": arguments.trouble,
        "hangs": arguments.hangs,
        "one_copy": arguments.one_copy,
    }
    if arguments.catch_up:
        modes["catches_up"] = True
    modes = cast("Modes", {name: True for name, wanted in modes.items() if wanted})
    named = next((name for name, one in SIMULATORS.items() if one == modes), json.dumps(modes))
    simulators = SIMULATORS if arguments.every else {named: modes}
    work = blocks(simulators, arguments.lighthouses, seeds)
    return 1 if run(work, arguments.jobs, simulators, arguments.state) else 0


if __name__ == "__main__":
    sys.exit(main())
