"""Measure what becomes of a group that hangs: the verdict, the time to it, and what the other group does until then.

Two groups train a tiny network under `keepstep run` (gloo). One of them hangs in each of these ways, or only takes
long. The limit is shorter than the 60 s of a job that sets none; the times of work that is no hang have the same ratio
to it as 60 s of compilation and 10 minutes of evaluation to 60 s. A false or a missing verdict fails the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from figures import Figure, Limit
from rich.console import Console
from rich.table import Table
from sides import ROOT, Side, keepstep_side, stop

from keepstep_mesh.exit_codes import EXIT_COLLECTIVES_DIFFER

SCRIPT = ROOT / "tests" / "support" / "jobs" / "hanging_trainer.py"
LIMIT, QUICK_LIMIT = 6.0, 4.0
"""``--hang-after``, in seconds."""
BESIDE = 2
"""Runs at the same time. Most of a run waits: for the limit, and for the pace of the trainers."""
COMPILATION, EVALUATION = 1.0, 10.0
"""Duration of each, in limits."""
COLLECTIVE_LIMITS = 3.0
"""``timeout`` of the Manager, in limits."""
WINDOW = 2.0
"""Seconds over which commits are counted before the hang and after the verdict."""
DEADLINE = 240.0
POLL = 0.05


@dataclass(frozen=True)
class Kind:
    """A way to hang, or to take long."""

    what: str
    order: str
    """Kind of ``hanging_trainer``; empty: the benchmark acts by itself."""
    verdict: str
    """``ended`` by the lighthouse with its line, ``lost``, ``named``, or ``none``."""
    line: str = ""
    """Part of the line that is named."""
    ranks: int = 1


KINDS = (
    Kind("while True: pass", "loop", "ended", "while True:"),
    Kind("a blocked lock", "lock", "ended", "lock.acquire()"),
    Kind("a worker of a DataLoader never answers", "loader", "ended", "next(batches)"),
    Kind("a file system hangs (FIFO)", "fifo", "ended", ".read_bytes()"),
    Kind("SIGSTOP of one rank of two", "", "lost", ranks=2),
    Kind("a group leaves out an all-reduce", "skip", "named", "all-reduce 2 of 2"),
    Kind("a compilation in the first step", "compile", "none", "time.sleep"),
    Kind("an evaluation in a declared section", "section", "none", "in the section 'evaluate'"),
)


@dataclass
class Seen:
    """One run."""

    verdict: str
    wrong: str = ""
    """Why the verdict is false or missing; empty: it is right."""
    seconds: float | None = None
    """From the beginning of the hang to the verdict."""
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Commits of the other group per second: before the hang, until the verdict, after it."""


@dataclass
class Job:
    """A `keepstep run`, and the lines that its trainers have written."""

    folder: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    told: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    """Group, and facts of each line of a trainer."""

    def read(self, log: Path) -> None:
        assert self.process.stdout is not None
        with log.open("a") as out:
            for line in self.process.stdout:
                out.write(line)
                self.lines.append(line)
                if (match := re.match(r"\[?r(\d+)/\d+\]?:? ?(\{.*\})", line)) is not None:
                    with contextlib.suppress(ValueError):
                        self.told.append((match[1], json.loads(match[2])))

    def times(self, event: str, group: str, after: float = 0.0) -> list[float]:
        found = [(who, one) for who, one in list(self.told) if one["event"] == event and one["rank"] == 0]
        return [when for who, one in found if who == group and (when := float(str(one["t"]))) > after]

    def rate(self, group: str, begin: float, end: float) -> float:
        commits = self.times("committed", group, begin)
        return sum(one <= end for one in commits) / max(end - begin, 1e-9)

    def until(self, ready: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {DEADLINE:g} s")
            time.sleep(POLL)  # neither output nor REST announces it

    def pid(self, group: str, rank: int) -> int:
        return next(int(str(one["pid"])) for who, one in reversed(self.told) if (who, one["rank"]) == (group, rank))

    def ask(self, path: str) -> dict[str, list[object]]:
        """Ask the lighthouse of the job. Its address is in the environment of the trainers."""
        environment = Path(f"/proc/{self.pid('0', 0)}/environ").read_bytes().decode(errors="replace")
        address = re.search(r"KEEPSTEP_LIGHTHOUSE=([^\0,]+)", environment)
        assert address is not None
        with urllib.request.urlopen(f"{address[1]}/v1/jobs/default/{path}", timeout=10) as answer:
            found: dict[str, list[object]] = json.load(answer)
        return found

    def events(self, kind: str) -> list[dict[str, object]]:
        return [one for one in self.ask("events?limit=1000")["events"] if isinstance(one, dict) and one["kind"] == kind]

    def named(self, part: str) -> bool:
        """Whether the lighthouse names a group in a sentence with ``part``."""
        return any(part in str(one) for one in self.ask("quorum")["hangs"])


@contextlib.contextmanager
def running(side: Side, kind: Kind, limit: float, log: Path) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "fifo")
        command = [side.python, "-m", "keepstep_cli", "run", "--replicas", "2", "--nproc-per-replica", str(kind.ranks)]
        command += ["--hang-after", f"{limit:g}", "--grace", "1", "--", SCRIPT]
        environment = {
            **side.environment(),
            "TRAINER_HANG": str(folder / "order"),
            "TRAINER_FIFO": str(folder / "fifo"),
            "TRAINER_TIMEOUT": f"{COLLECTIVE_LIMITS * limit:g}",
            "TRAINER_COMPILE": f"{COMPILATION * limit if kind.order == 'compile' else 0:g}",
        }
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        job = Job(folder, process)
        reader = threading.Thread(target=job.read, args=(log,))
        reader.start()
        try:
            yield job
        finally:
            stop(process)
            reader.join(30)


def measure(side: Side, kind: Kind, limit: float, log: Path) -> Seen:
    with running(side, kind, limit, log) as job:
        if kind.order == "compile":
            return compilation(job, kind)
        job.until(lambda: len(job.times("committed", "0")) > 20 and len(job.times("committed", "1")) > 20, "commits")
        time.sleep(WINDOW)  # the time that is measured
        began = time.time()
        if kind.order:
            (job.folder / "order").write_text(f"{kind.order} 1")
            job.until(lambda: job.times("hanging", "1"), "the hang")
            began = job.times("hanging", "1")[0]
        else:
            os.kill(job.pid("1", 1), signal.SIGSTOP)
        before = job.rate("0", began - WINDOW, began)
        if kind.verdict == "none":
            seen = evaluation(job, kind, limit, began)
        elif kind.verdict == "named":
            seen = left_out(job, kind, began)
        else:
            seen = end_of_group(job, kind, began)
        seen.rates = (before, *seen.rates[1:])
        return seen


def end_of_group(job: Job, kind: Kind, began: float) -> Seen:
    """Wait until the lighthouse ends the group, or loses it, and the other one goes on."""
    wanted = "hung" if kind.verdict == "ended" else "lost"
    job.until(lambda: job.events(wanted), f"{kind.what}: an event {wanted!r}")
    [event, *more] = job.events(wanted)
    verdict = float(str(event["time"]))
    (job.folder / "order").unlink(missing_ok=True)
    job.until(lambda: job.times("committed", "0", verdict), "a commit of the other group")
    goes_on = job.times("committed", "0", verdict)[0]
    job.until(lambda: time.time() > goes_on + WINDOW, "time")
    rates = (0.0, job.rate("0", began, verdict), job.rate("0", goes_on, goes_on + WINDOW))
    detail = event["detail"]
    assert isinstance(detail, dict)
    said = f"{wanted}: {detail.get('line') or detail.get('reason')}"
    right = str(event["replica_id"]).startswith("r1:") and not more and kind.line in said and rates[2] > 0
    right = right and (wanted == "lost" or detail["ended"] is True)
    return Seen(said, "" if right else f"{kind.what}: {event} {more}", verdict - began, rates)


def left_out(job: Job, kind: Kind, began: float) -> Seen:
    """Wait until the collective is named that a group left out, and the groups end: their counts cannot tell who."""
    job.until(lambda: job.named(kind.line), f"{kind.what}: a sentence with {kind.line!r}")
    verdict = time.time()
    rate = job.rate("0", began, verdict)
    hung = job.events("hung")
    code = job.process.wait(DEADLINE)
    wrong = "" if code == EXIT_COLLECTIVES_DIFFER and not hung else f"{kind.what}: exit code {code}, {hung}"
    return Seen(f"named, then exit code {code}", wrong, verdict - began, (0.0, rate, 0.0))


def evaluation(job: Job, kind: Kind, limit: float, began: float) -> Seen:
    """Let a section last, in which no group may be ended."""
    job.until(lambda: job.named(kind.line), f"{kind.what}: a sentence with {kind.line!r}")
    named = time.time()
    job.until(lambda: time.time() > began + EVALUATION * limit, "time")
    (job.folder / "order").unlink()
    ended = time.time()
    return no_hang(job, kind, "named", named - began, began, ended)


def compilation(job: Job, kind: Kind) -> Seen:
    job.until(lambda: job.times("started", "0") and job.times("started", "1"), "both have started")
    began = max(*job.times("started", "0"), *job.times("started", "1"))
    job.until(lambda: job.named(kind.line), f"{kind.what}: a sentence with {kind.line!r}")
    named = time.time()
    job.until(lambda: job.times("committed", "0"), "the first commit")
    return no_hang(job, kind, "named", named - began, began, job.times("committed", "0")[0])


def no_hang(job: Job, kind: Kind, said: str, seconds: float, began: float, ended: float) -> Seen:
    job.until(lambda: job.times("committed", "0", ended) and job.times("committed", "1", ended), "commits of both")
    goes_on = job.times("committed", "0", ended)[0]
    job.until(lambda: time.time() > goes_on + WINDOW, "time")
    gone = [*job.events("hung"), *job.events("lost")]
    rates = (0.0, job.rate("0", began, ended), job.rate("0", goes_on, goes_on + WINDOW))
    return Seen(f"no hang, {said}", f"{kind.what}: {gone}" if gone else "", seconds, rates)


def show(found: dict[str, list[Seen]], limit: float) -> None:
    table = Table(title=f"groups that hang: limit {limit:g} s")
    for column in ("what", "verdict", "seconds to it", "others' commits/s before", "until it", "after"):
        table.add_column(column, justify="left" if column in ("what", "verdict") else "right")
    for what, runs in found.items():
        last = runs[-1]
        seconds = ", ".join("-" if one.seconds is None else f"{one.seconds:.1f}" for one in runs)
        table.add_row(what, last.wrong or last.verdict, seconds, *(f"{one:.1f}" for one in last.rates))
    Console(width=None if os.isatty(1) else 160).print(table)


def run(*, quick: bool, log: Path) -> list[Figure]:
    side, limit = keepstep_side(), QUICK_LIMIT if quick else LIMIT
    found: dict[str, list[Seen]] = {kind.what: [] for kind in KINDS}

    def once(kind: Kind) -> None:
        print(f"hangs: {kind.what} ...", flush=True)
        try:
            seen = measure(side, kind, limit, log)
        except TimeoutError as error:
            seen = Seen("none", str(error))
        if seen.wrong:
            print(f"WRONG: {seen.wrong}", flush=True)
        found[kind.what].append(seen)

    longest_first = sorted(KINDS, key=lambda kind: kind.verdict != "none")
    with ThreadPoolExecutor(BESIDE) as pool:
        list(pool.map(once, longest_first))  # raises what a run has raised
    show(found, limit)
    wrong = [one.wrong for runs in found.values() for one in runs if one.wrong]
    figures = [Figure("hangs: false or missing verdicts", "", "max", [len(wrong)], limit=Limit(0), must=True,
                      definition="over all runs below", also={"wrong": wrong, "limit_s": limit})]  # fmt: skip
    for kind in KINDS:
        runs = found[kind.what]
        seconds = [one.seconds for one in runs if one.seconds is not None]
        also: dict[str, object] = {
            "verdicts": [one.verdict for one in runs],
            "others_commits_per_s": [one.rates for one in runs],
        }
        until = "named" if kind.verdict in ("named", "none") else "parted"
        bound = None if kind.verdict in ("none", "named") else Limit(2 * limit + (5 if kind.verdict == "lost" else 0))
        figures.append(Figure(f"hangs: {kind.what}: until {until}", "s", "max", seconds, limit=bound, also=also))
    return figures
