"""Run the fault runs, print the table of docs/guarantees.md, and write .faults/results.json.

make faults                                             all rows (about half an hour)
make faults FAULTS="--only leader_frozen --times 2"     one row, twice
make faults FAULTS=--list                               the names of the rows

Exit code: 0 if every promise held, 1 if one broke, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import signal
import sys
import time
from pathlib import Path

from tests.faults.outcome import Outcome, table
from tests.faults.rows import ROWS, play
from tests.support.network import namespaces
from tests.support.processes import forked

RESULTS = Path(__file__).resolve().parents[2] / ".faults"
"""Git-ignored. Also holds the logs of each row."""


async def play_all(options: argparse.Namespace) -> list[Outcome]:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel, asyncio.current_task())
    outcomes = []
    for name in options.only or ROWS:
        if ROWS[name].namespaces_only and (options.proxies or namespaces.why_not()):
            print(f"{name}: skipped; it needs network namespaces", flush=True)
            continue
        print(f"{name}: {ROWS[name].what}", flush=True)
        one = await play(name, options.times, proxies=options.proxies, say=_say, keep=options.results)
        outcomes.append(one)
        for sentence in one.broken:
            print(f"BROKEN {name}: {sentence}", flush=True)
        _write(outcomes, options.results)
    return outcomes


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _say(text: str) -> None:
    print(text, flush=True)


def _write(outcomes: list[Outcome], folder: Path) -> None:
    record = {"when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), "rows": [one.json() for one in outcomes]}
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description="Fault runs on real processes with a real etcd.")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help="rows to run (default: all)")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="repetitions of each row (default: by row)")
    parser.add_argument("--proxies", action="store_true", help="cut the network with TCP proxies instead of namespaces")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results.json and logs")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    options = parser.parse_args()
    if options.list:
        for row in ROWS.values():
            print(f"{row.name:24} {row.times:3} times  {row.what}")
        return 0
    options.results.mkdir(exist_ok=True)
    why_not = namespaces.why_not()
    if why_not and not options.proxies:
        print(f"{why_not}; cutting networks with TCP proxies instead", flush=True)
    began = time.monotonic()
    try:
        outcomes = asyncio.run(play_all(options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    print(f"\n{table(outcomes)}\n\n{time.monotonic() - began:.0f} s; every figure: {options.results / 'results.json'}")
    for one in outcomes:
        for sentence in one.broken:
            print(f"BROKEN {one.name}: {sentence}")
    return 1 if any(one.broken for one in outcomes) else 0


if __name__ == "__main__":
    forked.install()
    try:
        sys.exit(main())
    finally:
        forked.close()
