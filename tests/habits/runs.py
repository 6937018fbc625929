"""The three runs of a script: plain torch, torch's DDP with two processes, keepstep with two groups and a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import summary_lines, violation_lines
from tests.support.processes.forked import FORKS

SCRIPTS = Path(__file__).with_name("scripts")
DEADLINE = 150.0
LOOK_SECONDS = 1.0
"""Time between two looks at the output of a run."""
GIVEN_UP = "given up"
"""Words of `keepstep run` for a group that it does not start again."""
SHARED = "habit"
"""Module that all scripts import."""


def names() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != SHARED)


@dataclass(frozen=True, slots=True)
class Run:
    """One run that has ended."""

    folder: Path
    codes: list[int | None]
    """Exit codes; None: ended at the deadline."""
    output: str
    seconds: float

    @property
    def fine(self) -> bool:
        return not any(code != 0 for code in self.codes)


def _run(folder: Path, kind: str, commands: Sequence[Sequence[str]], variables: Sequence[dict[str, str]]) -> Run:
    folder.mkdir(parents=True)
    began = time.monotonic()
    processes = []
    with (folder / "output").open("wb") as output:
        for command, own in zip(commands, variables, strict=True):
            environment = {**os.environ, "HABIT_RUN": kind, "HABIT_RESULT": str(folder), **own}
            for name in ("KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
                environment.pop(name, None)
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd=folder,
                )
            )
        codes = [_end(process, folder, began + DEADLINE) for process in processes]
    text = (folder / "output").read_text(errors="replace")
    return Run(folder, codes, text, time.monotonic() - began)


def _end(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> int | None:
    """Wait for the end of a process, and return its exit code. None: it was ended at the deadline, or was refused."""
    while True:
        try:
            return process.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline or _is_refused(folder):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None


def _is_refused(folder: Path) -> bool:
    """Return whether a group was given up because its script is refused. The other one may wait for it for ever."""
    expected = folder / "expected.json"
    refused = expected.exists() and json.loads(expected.read_text() or "{}").get("refused")
    output = (folder / "output").read_text(errors="replace")
    return bool(refused) and refused in output and GIVEN_UP in output


def plain(name: str, folder: Path) -> Run:
    return _run(folder, "plain", [[sys.executable, str(SCRIPTS / f"{name}.py")]], [{}])


def ddp(name: str, folder: Path) -> Run:
    command = [sys.executable, str(SCRIPTS / f"{name}.py")]
    return _run(folder, "ddp", [command, command], [{"RANK": "0"}, {"RANK": "1"}])


def keepstep(name: str, folder: Path, *, victim: int = 1, alone: bool = False) -> Run:
    """Run a script with `keepstep run`.

    Args:
        name: of the script.
        folder: for its results.
        victim: number of the group that is killed.
        alone: whether the other group trains on alone until it is back.
    """
    least = [] if alone else ["--min-replicas", "2"]
    run = [sys.executable, "-m", "keepstep_cli", "run", "--replicas", "2", *least, "--state-dir", str(folder / "state")]
    command = [*run, "--", str(SCRIPTS / f"{name}.py")]
    variables = {
        "HABIT_VICTIM": str(victim),
        "HABIT_ALONE": "1" if alone else "",
        "KEEPSTEP_STEP_LOG": str(folder / "steps.jsonl"),
        FORKS: "1",
    }
    return _run(folder, "keepstep", [command], [variables])


def violations(run: Run) -> list[str]:
    """Return the lines of the rules of a history that a run with keepstep violated."""
    report = check_files([run.folder / "state", run.folder / "steps.jsonl"])
    return [] if report.fine else summary_lines(report) + violation_lines(report)
