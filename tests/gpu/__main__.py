"""Run the checks for GPUs, print a table, and write gpu-report.json and docs/gpus.md.

make gpu                                    all checks, in at most 8 minutes
make gpu GPU="--seconds 1800"               the same with more time, for a slow machine
make gpu GPU="--only collectives baby"      some of them
make gpu GPU=--list                         their names
make gpu GPU="--device cpu"                 the same checks with Gloo on the CPU, where that is possible

The most important checks come first, each with a limit of its own; those that the time does not suffice for are skipped
by name. The report is written after each check. Without a GPU, or without NCCL in torch, every check is skipped by
name. Exit code: 0 if no check failed, 1 if one did, 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.gpu.budget import TOTAL_SECONDS, Budget
from tests.gpu.check import Check, Outcome
from tests.gpu.checks import CHECKS
from tests.gpu.machine import Machine, why_no_gpu
from tests.gpu.report import lines_of, summary, write_json, write_page
from tests.gpu.running import NO_TIME, NOT_BEGUN, in_thread, run_check
from tests.gpu.starting import ROOT, Starter


def main() -> int:
    options = _parser().parse_args()
    chosen = [CHECKS[name] for name in options.only or CHECKS]
    if options.list:
        for check in chosen:
            print(f"{check.name:16} {check.ranks} ranks, {check.seconds:3.0f} s at most  {check.what}")
        return 0
    began = time.monotonic()
    try:
        with contextlib.closing(Starter.prepared()) as starter:
            machine = Machine.this()
            for name, value in machine.rows():
                print(f"{name:8} {value}")
            outcomes = _run_all(
                chosen,
                machine,
                options.device,
                Budget(options.seconds),
                starter,
                lambda found: write_json(options.report, machine, options.device, found),
            )
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    print()
    for line in lines_of(outcomes):
        print(line)
    print(f"\n{summary(outcomes)} in {time.monotonic() - began:.0f} s; every figure: {options.report}")
    if options.device == "cuda" and not options.only and any(one.state == "passed" for one in outcomes):
        write_page(options.page, machine, outcomes)
        print(f"wrote {options.page}")
    return 1 if any(one.state == "failed" for one in outcomes) else 0


def _run_all(
    chosen: list[Check],
    machine: Machine,
    device: str,
    budget: Budget,
    starter: Starter,
    report: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Run the checks. ``report`` gets all outcomes after each check; of those to come, that they did not begin."""
    reason = why_no_gpu() if device == "cuda" else ""
    if reason:
        print(f"no check runs: {reason}", flush=True)
    found = {one.name: Outcome(one.name, one.what, "skipped", "no GPU" if reason else NOT_BEGUN) for one in chosen}
    report(list(found.values()))
    if reason:
        return list(found.values())
    gpus = len(machine.gpus) if device == "cuda" else 0
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="keepstep-gpu-"))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the ranks have sessions of their own

    def run(check: Check) -> Outcome:
        limited = budget.limited(check, time.monotonic() - began)
        if limited is None:
            return Outcome(check.name, check.what, "skipped", NO_TIME)
        return run_check(limited, gpus, machine.nccl, folder, starter)

    beside = {one.name: in_thread(lambda one=one: run(one)) for one in chosen if one.sleeps}  # type: ignore[misc]
    try:
        for check in chosen:
            print(f"{check.name}: {check.what}", flush=True)
            found[check.name] = outcome = beside[check.name].result() if check.sleeps else run(check)
            print(*(f"  {line}" for line in lines_of([outcome])), sep="\n", flush=True)
            report(list(found.values()))
    finally:
        signal.signal(signal.SIGTERM, before)
        starter.close()  # ranks of an interrupted check write into the folder
        shutil.rmtree(folder, ignore_errors=True)  # a killed rank may still write its log
    return list(found.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make gpu", description="Checks of keepstep on GPUs with NCCL.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with Gloo, without GPUs")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help="checks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all checks (default: %(default)g)")
    parser.add_argument("--report", type=Path, default=ROOT / "gpu-report.json", help="file for every figure")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpus.md", help="page to write after a whole run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
