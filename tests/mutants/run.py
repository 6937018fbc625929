"""Plant each bug of ``mutations`` in a copy of the packages and require that its check fails.

Prints the failure that caught each. Exit code 1 if a check misses its bug, fails without it, or cannot run, or if the
source line of a bug is not found exactly once.
``python -m tests.mutants.run [--only WORDS]`` runs the bugs whose names contain these words.
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
TIMEOUT_SECONDS = 240.0
"""Seconds of one check. A check that hangs has caught its bug."""
CAUGHT, PASSED, BROKEN = 1, 0, 2
"""Exit codes of a check, equal to pytest's. ``BROKEN``: it could not run, as when the change is no valid Python."""
TRACE_SEEDS = 5


@dataclass(frozen=True)
class Outcome:
    """``caught`` None: the check could not run. ``output``: its last line."""

    caught: bool | None
    seconds: float
    output: str


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
            command_of(check),
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(caught=True, seconds=time.monotonic() - began, output=f"timed out after {TIMEOUT_SECONDS:g} s")
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    known = {CAUGHT: True, PASSED: False}.get(done.returncode)
    return Outcome(known, time.monotonic() - began, lines[-1] if lines else "")


def mutant(mutation: Mutation, copy: Path) -> Outcome:
    path = copy / mutation.file
    whole = path.read_text()
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        return checked(mutation.check, copy)
    finally:
        path.write_text(whole)


def simulate(check: Trace | Seeds) -> int:
    """Run ``check`` in the copy. Returns ``CAUGHT`` when a rule is broken."""
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
    parser.add_argument("--only", default="", help="run only bugs whose names contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of checks at a time")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check:
        try:
            return simulate(eval(arguments.check))
        except Exception:  # noqa: BLE001 - Python's own exit code would be CAUGHT
            traceback.print_exc()
            return BROKEN
    chosen = [one for one in MUTATIONS if arguments.only in one.name]
    if missing := [one for one in chosen if not found_once(one)]:
        print("\n".join(f"{one.name}: its source line must occur exactly once in {one.file}" for one in missing))
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
                print(f"WITHOUT A BUG {check} fails: {outcome.output}", flush=True)
        for mutation, outcome in zip(chosen, pool.map(broken, chosen), strict=True):
            how = {True: "caught", False: "SURVIVES", None: "BROKEN"}[outcome.caught]
            failed += outcome.caught is not True
            print(f"{how:8} {outcome.seconds:5.1f} s  {mutation.name}", flush=True)
            print(f"                   by {mutation.check}: {outcome.output[:160]}", flush=True)
    print(f"{len(chosen)} bugs, {failed} failures, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
