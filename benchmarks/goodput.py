"""Measure goodput: the samples that a job of three groups keeps while one group after another gets SIGKILL.

keepstep (`keepstep run`, warm starts, ``retry_allreduce``), torchft, whose processes this benchmark starts again at
once, and checkpoint and restart (torchrun and torch.distributed.checkpoint) get the same kills at the same times. A
figure is the rate of useful samples in the window of the kills, divided by that in the undisturbed time before it, of
the same job. Useful samples are those that the final model contains (``goodput_model``).

A step waits for ``COMPUTE_SECONDS`` in place of the work of an accelerator, because three groups and a starting process
would compete for a few cores: their steps would then become longer in every failure, on all sides. The network itself
is tiny. Failures every ten minutes are simulated from the measured costs of the kills.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from figures import Figure, Limit
from goodput_model import (
    GROUPS,
    Commit,
    Cost,
    Kill,
    best_every,
    cost,
    kept,
    kills,
    median_step,
    of_replicas,
    of_restarts,
    useful,
)
from one_copy import torchrun
from rich.console import Console
from rich.table import Table
from sides import HERE, Side
from way_back import Job, under_keepstep_run, under_torchft

WINDOWS = {60.0: 60.0, 10.0: 40.0}
"""Seconds of the window by the mean time between failures, in the order in which a job has them."""
QUICK_WINDOWS = {10.0: 40.0}
RARE_SECONDS = 600.0
SIMULATED_SECONDS = 200_000.0
UNDISTURBED_SECONDS = 15.0
COMPUTE_SECONDS = 0.15
LAST_COMMIT_SECONDS = 60.0
"""Longest wait after a window for the next commit."""
SEED = 45
GOALS = {10.0: 0.97, 60.0: 0.995}
PARTS = ("pause", "away")
SYSTEMS = ("keepstep", "torchft", "restart")
NAMES = {"keepstep": "keepstep", "torchft": "torchft", "restart": "torchrun and DCP"}


@dataclass(frozen=True)
class Measured:
    """One job with its kills.

    Attributes:
        goodput: of the window.
        step: seconds of an undisturbed step.
        costs: of each kill that no other one followed before its group was back.
        save: seconds of a checkpoint; 0: none.
        every: steps between two checkpoints; 0: none.
        kills: number of them that hit a process.
    """

    goodput: float
    step: float
    costs: list[Cost]
    save: float
    every: int
    kills: int

    def simulated(self, mean: float, costs: Sequence[Cost]) -> float | None:
        """Return the goodput with another mean time between failures, of which each draws one of ``costs``."""
        if not costs:
            return None
        if self.every:
            return of_restarts([one.away for one in costs], self.step, self.save, self.every, mean, SIMULATED_SECONDS)
        return of_replicas(costs, self.step, mean, SIMULATED_SECONDS)


@contextlib.contextmanager
def running(system: str, sides: dict[str, Side], job: Job, mean: float, log: Path) -> Iterator[None]:
    """Run a job until all its groups commit together, and restart what ends."""
    if system == "keepstep":
        started = under_keepstep_run(sides[system], job, log, compute=COMPUTE_SECONDS, KEEPSTEP_RETRY_ALLREDUCE="1")
    elif system == "torchft":
        started = under_torchft(sides[system], job, log, COMPUTE_SECONDS)
    else:
        words = ["", HERE / "restart_trainer.py", job.folder, COMPUTE_SECONDS, mean]
        started = torchrun(sides["keepstep"], GROUPS, [str(word) for word in words], log, restarts=10_000)
    with started:
        job.until_all_commit(time.time())
        yield


def commits_of(job: Job) -> list[Commit]:
    return [
        Commit(float(row[1]), int(row[3]), int(row[2]))
        for group in range(GROUPS)
        for rows in job.of_group(group).values()
        for row in rows
        if row[0] == "commit"
    ]


def parts_taken(job: Job, group: int) -> list[tuple[float, int]]:
    """Return the time and process of each commit in which a group took part."""
    found = job.of_group(group).items()
    return [(float(row[1]), pid) for pid, rows in found for row in rows if row[0] == "commit" and row[4] == "1"]


def carry_out(job: Job, plan: list[Kill], begin: float) -> list[tuple[float, int, int]]:
    """Kill at the planned times. Return the time, group and process of each kill that hit one."""
    done = []
    for one in plan:
        time.sleep(max(0.0, begin + one.time - time.time()))  # until the planned time
        pid = job.newest(one.group)
        with contextlib.suppress(ProcessLookupError):  # the group is away already
            os.kill(pid, signal.SIGKILL)
            done.append((time.time(), one.group, pid))
    return done


def costs_of(job: Job, done: list[tuple[float, int, int]], kept_commits: list[Commit], step: float) -> list[Cost]:
    """Return the costs of the kills after which no other one came before the group was back."""
    found = []
    for number, (killed, group, old) in enumerate(done):
        later = [when for when, pid in parts_taken(job, group) if pid != old and when > killed]
        following = done[number + 1][0] if number + 1 < len(done) else float("inf")
        if later and min(later) < following and (one := cost(kept_commits, killed, min(later), step)):
            found.append(one)
    return found


def measure(system: str, sides: dict[str, Side], windows: dict[float, float], log: Path) -> dict[float, Measured]:
    """Measure one job in windows one after another; return what each showed, by its mean time between failures."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name))
        with running(system, sides, job, next(iter(windows)), log):
            calm = time.time()
            time.sleep(UNDISTURBED_SECONDS + 3 * COMPUTE_SECONDS)  # the time that is measured, and a commit after it
            undisturbed = kept(commits_of(job))
            for mean, window in windows.items():
                if found and system == "restart":
                    save_every(job, mean)
                begin = time.time()
                done = carry_out(job, kills(mean, window, SEED), begin)
                time.sleep(max(0.0, begin + window - time.time()))  # the time that is measured
                end = time.time()
                while max(one.time for one in commits_of(job)) < end and time.time() < end + LAST_COMMIT_SECONDS:
                    time.sleep(0.1)  # files announce nothing
                found[mean] = of_window(system, job, undisturbed, calm, (begin, end), done)
                print(f"{NAMES[system]}, a failure every {mean:g} s: {found[mean].goodput:.4f}", flush=True)
                if len(found) < len(windows):
                    job.until_all_commit(time.time())
    return found


def save_every(job: Job, mean: float) -> None:
    """Let a job of torchrun go on with as many steps between two checkpoints as another mean time asks for."""
    (job.folder / "every").write_text(str(best_every(fmean(saves_of(job)), COMPUTE_SECONDS, mean)))
    killed = time.time()
    os.kill(job.newest(0), signal.SIGKILL)  # it reads the file at a start
    job.until_all_commit(killed + 1.0)


def saves_of(job: Job) -> list[float]:
    return [float(row[1]) for rows in job.of_group(0).values() for row in rows if row[0] == "save"]


def of_window(
    system: str,
    job: Job,
    undisturbed: list[Commit],
    calm: float,
    window: tuple[float, float],
    done: list[tuple[float, int, int]],
) -> Measured:
    found, saves, every = kept(commits_of(job)), saves_of(job), job.folder / "every"
    step = median_step([one for one in undisturbed if calm <= one.time])
    rate = useful(undisturbed, calm, calm + UNDISTURBED_SECONDS) / UNDISTURBED_SECONDS
    return Measured(
        goodput=useful(found, *window) / (window[1] - window[0]) / rate,
        step=1 / rate if system != "restart" else step,
        costs=costs_of(job, done, found, step),
        save=fmean(saves) if saves else 0.0,
        every=int(every.read_text()) if every.exists() else 0,
        kills=len(done),
    )


def show(rows: dict[tuple[str, float], Measured], costs: dict[str, list[Cost]]) -> None:
    table = Table(title="goodput of three groups, and the mean cost of a kill")
    for column in ("", "mean time", "kills", "goodput", "simulated", "step", "pause", "away", "save", "every"):
        table.add_column(column, justify="left" if not column else "right")
    for (system, mean), one in rows.items():
        cells = [f"{fmean(getattr(cost, name) for cost in one.costs):.2f} s" if one.costs else "" for name in PARTS]
        computed = one.simulated(mean, costs[system])
        simulated = "" if computed is None else f"{computed:.4f}"
        saves = [f"{1e3 * one.save:.0f} ms", str(one.every)] if one.every else ["", ""]
        table.add_row(NAMES[system], f"{mean:g} s", str(one.kills), f"{one.goodput:.4f}", simulated,
                      f"{1e3 * one.step:.1f} ms", *cells, *saves)  # fmt: skip
    Console(width=None if os.isatty(1) else 140).print(table)


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    sides = {"keepstep": ours, "torchft": theirs}
    rows: dict[tuple[str, float], Measured] = {}
    for system in SYSTEMS:
        print(f"goodput, {NAMES[system]} ...", flush=True)
        measured = measure(system, sides, QUICK_WINDOWS if quick else WINDOWS, log)
        rows |= {(system, mean): one for mean, one in measured.items()}
    costs = {
        system: [each for (name, _), one in rows.items() if name == system for each in one.costs] for system in SYSTEMS
    }
    show(rows, costs)
    means = sorted({mean for _, mean in rows})
    figures = []
    for mean in (*means, RARE_SECONDS):
        found = {system: rows[system, min(mean, means[-1])] for system in SYSTEMS}
        simulated = {system: one.simulated(mean, costs[system]) for system, one in found.items()}
        values = {system: one.goodput for system, one in found.items()} if mean in means else simulated
        figures.append(
            Figure(
                f"goodput, a failure every {mean:g} s{'' if mean in means else ', simulated'}",
                *("", "p50", [values["keepstep"] or 0.0], [values["torchft"] or 0.0]),
                Limit(value=GOALS[mean]) if mean in GOALS else None,
                more_is_better=True,
                definition="useful samples per second of three groups, relative to the same job without failures",
                also={
                    "restart": values["restart"],
                    "simulated": simulated,
                    "measured": {system: asdict(one) for system, one in found.items()},
                },
            )
        )
    return figures
