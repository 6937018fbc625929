"""Makes each mistake of ``mutations`` in a copy of the packages and demands that its check catches it.

Prints what caught each. Exit code 1 when a mistake survives, when its place is not found exactly once, or when a check
fails without it.
``python -m tests.mutants.run [--only WORDS]``: those whose name has these words.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutation import Check, Mutation, Seeds, Test, Trace
from tests.mutants.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("libs", "services", "tests", "pyproject.toml")
LONGEST = 240.0
"""Seconds of one check; a mutant that makes it hang is caught."""
CAUGHT, PASSED, BROKEN = 1, 0, 2
"""Exit codes of a check, as pytest has them. Broken: it could not be run, as when what was changed is no Python."""
TRACE_SEEDS = 5


@dataclass(frozen=True)
class Outcome:
    """``caught`` None: the check could not be run; ``said``: its last words."""

    caught: bool | None
    seconds: float
    said: str


def found_once(mutation: Mutation, root: Path = ROOT) -> bool:
    return (root / mutation.file).read_text().count(mutation.old) == 1


def command_of(check: Check) -> list[str]:
    match check:
        case Trace() | Seeds():
            return [sys.executable, "-m", "tests.mutants.run", "--check", repr(check)]
        case Test(id):
            return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q", id]


def checked(check: Check, copy: Path) -> Outcome:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(copy / one) for one in ("libs", "services", "."))}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    began = time.monotonic()
    try:
        done = subprocess.run(
            command_of(check), cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(caught=True, seconds=time.monotonic() - began, said=f"it took longer than {LONGEST:g} s")
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    known = {CAUGHT: True, PASSED: False}.get(done.returncode)
    return Outcome(known, time.monotonic() - began, said[-1] if said else "")


def mutant(mutation: Mutation, copy: Path) -> Outcome:
    path = copy / mutation.file
    whole = path.read_text()
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        return checked(mutation.check, copy)
    finally:
        path.write_text(whole)


def simulate(check: Trace | Seeds) -> int:
    """In the copy: ``CAUGHT`` when something that must hold is violated."""
    from tests.simulation.checks.violation import Violation
    from tests.simulation.run import violation
    from tests.simulation.traces import TRACES

    if isinstance(check, Trace):
        for seed in range(TRACE_SEEDS):
            try:
                TRACES[check.name].play(seed)
            except Violation as error:
                print(f"seed {seed}: {error}")
                return CAUGHT
        return PASSED
    for seed in range(check.first, check.first + check.count):
        if (what := violation(seed, lighthouses=check.lighthouses)) is not None:
            print(f"seed {seed}: {what}")
            return CAUGHT
    return PASSED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check:
        try:
            return simulate(eval(arguments.check))
        except Exception:  # noqa: BLE001 - Python's own exit code for it is that of a mistake that was caught
            traceback.print_exc()
            return BROKEN
    chosen = [one for one in MUTATIONS if arguments.only in one.name]
    if lost := [one for one in chosen if not found_once(one)]:
        print("\n".join(f"{one.name}: its place in {one.file} is not there once" for one in lost))
        return 1
    with tempfile.TemporaryDirectory(prefix="keepstep-mutants-") as directory:
        return run(chosen, Path(directory), arguments.jobs)


def run(chosen: list[Mutation], directory: Path, jobs: int) -> int:
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        copy = directory / str(number)
        copy.mkdir()
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, copy / name)
        copies.put(copy)

    def whole(check: Check) -> Outcome:
        copy = copies.get()
        try:
            return checked(check, copy)
        finally:
            copies.put(copy)

    def broken(mutation: Mutation) -> Outcome:
        copy = copies.get()
        try:
            return mutant(mutation, copy)
        finally:
            copies.put(copy)

    failed, began = 0, time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        checks = list(dict.fromkeys(one.check for one in chosen))
        for check, outcome in zip(checks, pool.map(whole, checks), strict=True):
            if outcome.caught is not False:
                failed += 1
                print(f"WITHOUT A MISTAKE {check} fails: {outcome.said}", flush=True)
        for mutation, outcome in zip(chosen, pool.map(broken, chosen), strict=True):
            how = {True: "caught", False: "SURVIVES", None: "BROKEN"}[outcome.caught]
            failed += outcome.caught is not True
            print(f"{how:8} {outcome.seconds:5.1f} s  {mutation.name}", flush=True)
            print(f"                   by {mutation.check}: {outcome.said[:160]}", flush=True)
    print(f"{len(chosen)} mistakes, {failed} not as they should be, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
