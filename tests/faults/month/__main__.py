"""Drive each service through a month of jobs and groups that come and go, and print what it held.

make month                              100,000 jobs; each service in a process of its own
make month MONTH="--jobs 3000 --only relay"

Exit code: 1 if anything was not bounded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keepstep_mesh.config import logging
from tests.faults.month import lighthouse_month, metrics_month, relay_month
from tests.faults.month.figures import Figures
from tests.faults.month.virtual_time import Clock, run

MONTHS = {"lighthouse": lighthouse_month.month, "relay": relay_month.month, "metrics": metrics_month.month}


def play(name: str, jobs: int, folder: Path) -> Figures:
    """Return what the service ``name`` held."""
    clock, found = Clock(), []

    async def work() -> None:
        found.append(await MONTHS[name](clock, jobs, folder))

    run(clock, work())
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make month", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--only", choices=list(MONTHS))
    options = parser.parse_args()
    if options.only is None:
        command = (sys.executable, "-m", "tests.faults.month", "--jobs", str(options.jobs), "--only")
        return max([subprocess.run([*command, name], check=False).returncode for name in MONTHS])
    logging.configure("critical")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-month-") as folder:
        figures = play(options.only, options.jobs, Path(folder))
    print(f"{options.only}, {options.jobs:,} jobs in a month ({time.monotonic() - began:.0f} s)\n\n{figures.table()}\n")
    for sentence in figures.broken():
        print(f"BROKEN {options.only}: {sentence}")
    return 1 if figures.broken() else 0


if __name__ == "__main__":
    sys.exit(main())
