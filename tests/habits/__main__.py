"""``python -m tests.habits [NAME...]``: train each script in three ways, one after another, and compare.

The exit code is 1 if one of them is not as it expects.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.habits import comparing, runs
from tests.support.processes import forked


def check(name: str, folder: Path, *, victim: int = 1, alone: bool = False) -> tuple[str, list[str]]:
    """Train a script in three ways. Return the result in a few words, and its faults.

    Args:
        name: of the script.
        folder: for the results of the runs.
        victim: number of the group that is killed.
        alone: whether the other group trains on alone. Then its state is compared with no other run.
    """
    plain = runs.plain(name, folder / "plain")
    torch_ddp = runs.ddp(name, folder / "ddp")
    if faults := comparing.faults_of_ddp(torch_ddp, plain):
        return "DDP differs", faults
    run = runs.keepstep(name, folder / "keepstep", victim=victim, alone=alone)
    faults = comparing.faults_of_keepstep(run, None if alone else torch_ddp)
    if not faults or run.fine:
        faults += runs.violations(run)
    hopes = comparing.expected(torch_ddp)
    if hopes["refused"]:
        return "refused", faults
    if alone:
        return "groups equal", faults
    return "as DDP" if not hopes["ddp"] else f"as DDP but {', '.join(hopes['ddp']) or 'other data'}", faults


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.habits", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts of tests/habits/scripts; default: all")
    parser.add_argument("--victim", type=int, default=1, choices=(0, 1), help="number of the group that is killed")
    parser.add_argument("--alone", action="store_true", help="the other group trains on alone until it is back")
    parser.add_argument("--keep", type=Path, help="folder that keeps the results; it must not exist")
    options = parser.parse_args()
    known = runs.names()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"script {unknown[0]!r} not found; known: {', '.join(known)}")
    forked.install()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        top = options.keep or Path(temporary)
        for number, name in enumerate(chosen := options.names or known, 1):
            began = time.monotonic()
            print(f"[{number}/{len(chosen)}] {name} ... ", end="", flush=True)
            result, faults = check(name, top / name, victim=options.victim, alone=options.alone)
            seconds = time.monotonic() - began
            rows.append((name, "FAULT" if faults else result, seconds))
            print(f"{'FAULT' if faults else result} ({seconds:.1f} s)", flush=True)
            for fault in faults:
                print(f"  {fault}", flush=True)
    forked.close()
    width = max(len(name) for name, _, _ in rows)
    print("\n" + "\n".join(f"{name:<{width}}  {seconds:5.1f} s  {result}" for name, result, seconds in rows))
    failed = sum(result == "FAULT" for _, result, _ in rows)
    print(f"{len(rows) - failed} of {len(rows)} scripts are as they expect")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
