"""Measure the time until groups commit again after one of three dies or freezes.

Three real processes (gloo, a small network, 10 ms between steps in place of loading data) run under a lighthouse with
default limits; each writes the time of every commit. One gets SIGKILL (or SIGSTOP) while all three commit together. The
figure is the time from the signal to the first commit without it, of the later of the two others. A process that has
done its imports then replaces it, and the next turn begins when all three commit together again. A further run sends
SIGKILL to trainers with forked DataLoader workers, which outlive them by seconds. At the end ``keepstep check-history``
must find no violation in the logs of keepstep's side.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure, Limit, p50, p95
from sides import HEARTBEAT_TIMEOUT_S, HERE, Lighthouse, Side, lighthouse

from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import summary_lines, violation_lines

GROUPS = 3
KILLS = {"keepstep": 15, "torchft": 5}
WORKER_KILLS, FREEZES, QUICK_TIMES = 3, 2, 2
PAUSE = 0.01
COLLECTIVE_TIMEOUT = 30.0
GIVE_UP = 120.0
POLL = 0.005


class Group:
    """One group. Its next process has done its imports and waits until the current one is killed."""

    def __init__(
        self,
        side: Side,
        number: int,
        server: Lighthouse,
        folder: Path,
        log: Path,
        *flags: str,
        command: tuple[str, ...] = (),
    ) -> None:
        """``flags``: more of the trainer's. ``command`` stands before its own."""
        self.flags, self.command = flags, command
        self.side, self.number, self.server, self.folder, self.log = side, number, server, folder, log
        self.incarnation = 0
        self.commits = folder
        self.process: subprocess.Popen[str] | None = None
        self.spare: subprocess.Popen[str] | None = None

    def prepare(self) -> None:
        """Start the next process; return when it has done its imports."""
        self.incarnation += 1
        command = [
            *self.command,
            self.side.python,
            HERE / "trainer.py",
            "--library",
            self.side.name,
            "--out",
            self._next_commits(),
        ]
        command += ["--lighthouse", self.server.address, "--group", str(self.number), "--groups", str(GROUPS)]
        command += ["--min-replicas", str(GROUPS - 1), "--pause", str(PAUSE), "--timeout", str(COLLECTIVE_TIMEOUT)]
        command += self.flags
        with self.log.open("ab") as errors:
            self.spare = subprocess.Popen(
                [*command, "--on-cue"],
                env={**self.side.environment(), "KEEPSTEP_STEP_LOG": f"{self._next_commits()}.jsonl"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        if self.spare.stdout.readline() != "ready\n":
            raise RuntimeError(f"a trainer of {self.side.name} did not start; see {self.log}")

    def _next_commits(self) -> Path:
        return self.folder / f"{self.number}.{self.incarnation}"

    def start(self) -> None:
        """Let the prepared process join."""
        self.process, self.spare = self.spare, None
        self.commits = self._next_commits()
        self.commits.touch()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def first_commit(self, after: float, counts: Callable[[int], bool]) -> float | None:
        """Return the Unix time of the first commit after ``after`` for which ``counts(participants)`` holds."""
        whole_lines = self.commits.read_text().rpartition("\n")[0].splitlines()
        for when, _step, participants, _seconds in (line.split() for line in whole_lines):
            if float(when) > after and counts(int(participants)):
                return float(when)
        return None

    def end(self) -> None:
        for process in (self.process, self.spare):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def last_commit(groups: list[Group], after: float, counts: Callable[[int], bool]) -> float:
    """Return the time of the first such commit of the last of ``groups`` (see ``Group.first_commit``)."""
    deadline = time.monotonic() + GIVE_UP
    while time.monotonic() < deadline:
        commits = [group.first_commit(after, counts) for group in groups]
        if None not in commits:
            return max(commits)
        time.sleep(POLL)  # trainers of both libraries only write lines to files
    raise TimeoutError(f"groups {[group.number for group in groups]} did not all commit within {GIVE_UP} s")


def check_history(folder: Path) -> None:
    report = check_files([folder])
    if not report.fine:
        raise RuntimeError("\n".join([*summary_lines(report), *violation_lines(report)]))


def measure(
    side: Side, how: signal.Signals, times: int, log: Path, said: Callable[[float], None], *flags: str
) -> list[float]:
    """Seconds from the signal to the first commit without the group, ``times`` times over. ``flags``: see ``Group``."""
    dice = random.Random(7)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
    ):
        if side.name == "keepstep":
            stack.callback(check_history, Path(folder))
        events = Path(folder) / "events.jsonl"
        server = stack.enter_context(lighthouse(side, min_replicas=GROUPS - 1, log=log, event_log=events))
        groups = [Group(side, number, server, Path(folder), log, *flags) for number in range(GROUPS)]
        for group in groups:
            stack.callback(group.end)
            group.prepare()
        for group in groups:
            group.start()
        seconds = []
        for turn in range(times):
            victim = groups[turn % GROUPS]
            others = [group for group in groups if group is not victim]
            victim.prepare()
            last_commit(groups, time.time(), GROUPS.__eq__)
            time.sleep(0.5 + dice.random() * 2 * PAUSE)  # the kill comes anywhere within a step
            signalled = time.time()
            victim.process.send_signal(how)
            seconds.append(last_commit(others, signalled, GROUPS.__ne__) - signalled)
            said(seconds[-1])
            victim.process.kill()
            victim.process.wait()
            victim.start()
        return seconds


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    figures = []
    workers, freezes = dict.fromkeys(KILLS, WORKER_KILLS), dict.fromkeys(KILLS, FREEZES)
    scenes: tuple[tuple[str, signal.Signals, dict[str, int], Limit, tuple[str, ...]], ...] = (
        ("SIGKILL", signal.SIGKILL, KILLS, Limit(value=0.1), ()),
        ("SIGKILL, forked workers", signal.SIGKILL, workers, Limit(value=0.1), ("--workers", "2")),
        ("SIGSTOP", signal.SIGSTOP, freezes, Limit(value=HEARTBEAT_TIMEOUT_S + 0.5), ()),
    )
    for name, how, times_of, limit, flags in scenes:
        found: dict[str, list[float]] = {}
        for side in (theirs, ours):
            times = min(QUICK_TIMES, times_of[side.name]) if quick else times_of[side.name]
            print(f"{name} to next commit, {times} times: {side.name} ...", end=" ", flush=True)
            found[side.name] = measure(side, how, times, log, lambda s: print(f"{s:.2f}", end=" ", flush=True), *flags)
            print()
        a, b = found[ours.name], found[theirs.name]
        definition = f"seconds from {how.name} of one of three groups to the first commit without it by both others"
        title = f"{name} to next commit"
        spread = {f"{stat.__name__}_s": {"keepstep": stat(a), "torchft": stat(b)} for stat in (p50, p95, max, min)}
        figures.append(Figure(title, "s", "p50", a, b, definition=definition, also=spread))
        statistic = "p95" if times_of is KILLS else "max"
        figures.append(Figure(f"{title}, {statistic}", "s", statistic, a, b, limit, definition=definition))
    return figures
