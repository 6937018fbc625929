"""Measure the way back of a killed group, part by part: from SIGKILL to its own next commit.

Three groups of one rank train a tiny network (gloo, 10 ms between steps in place of loading data). One of them gets
SIGKILL while all commit, when it has run for ``LIFE_SECONDS``. `keepstep run` restarts it, warm and with ``--cold``.
torchft has no launcher that restarts a group at once, so this benchmark starts its process again as soon as the kernel
reports the end. With transformers and lightning installed, both kinds of start of keepstep run with these imports too.

Parts: the end is *noticed* by `keepstep run`; *pause* before the restart; *start* until the first line of the script;
*imports*; *session*: model, Manager, connection to the lighthouse; *quorum*: until the group is in one, with its
process group built; *heal*: until it has the weights; *step*: until its commit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from figures import Figure, Limit, p50, p95
from rich.console import Console
from rich.table import Table
from sides import HERE, Side, lighthouse, stop

GROUPS = 3
KILLS, SLOW_KILLS, QUICK_KILLS = 15, 3, 3
"""Warm starts; cold starts, and restarts of torchft; with ``--quick``."""
LIFE_SECONDS = 11.0
"""Longer than the shortest life after which `keepstep run` restarts a group at once."""
LIMIT_SECONDS = 180.0
WARM_SECONDS = 900.0
POLL = 0.01
HEAVY = ("transformers", "lightning")
PARTS = ("noticed", "pause", "start", "imports", "session", "quorum", "heal", "step")
Back = dict[str, float]
"""Seconds of each part of one way back, and ``total``."""


class Job:
    """The files of a job: those of its processes, and of keepstep the step log and ``run.log``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_group(self, group: int) -> dict[int, list[list[str]]]:
        """Return the lines of each process of a group, by pid."""
        found = {}
        for file in self.folder.glob(f"{group}.*"):
            lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found[int(file.suffix[1:])] = lines
        return found

    def newest(self, group: int) -> int:
        """Return the process of a group that began last."""
        lines = {pid: rows for pid, rows in self.of_group(group).items() if rows}
        return max(lines, key=lambda pid: float(lines[pid][0][1]))

    def until_all_commit(self, after: float) -> None:
        """Wait until the groups have committed together."""

        def together(group: int) -> bool:
            rows = [row for lines in self.of_group(group).values() for row in lines if row[0] == "commit"]
            return any(float(row[1]) > after and int(row[2]) == GROUPS for row in rows)

        self._until(lambda: all(together(group) for group in range(GROUPS)), "the groups do not commit together")

    def until_commit(self, group: int, old: set[int]) -> tuple[int, dict[str, float]]:
        """Wait for the first commit of a new process. Return its pid, and the times of its parts."""
        found: dict[int, dict[str, float]] = {}

        def committed() -> bool:
            for pid, rows in self.of_group(group).items():
                if pid not in old and any(row[0] == "commit" for row in rows):
                    found[pid] = {row[0]: float(row[1]) for row in reversed(rows)}
            return bool(found)

        self._until(committed, f"group {group} does not commit")
        return next(iter(found.items()))

    def until_noted(self, sentence: str) -> None:
        self._until(lambda: any(sentence in text for _, _, text in self.notes()), f"no line {sentence!r}", WARM_SECONDS)

    def notes(self) -> list[tuple[float, str, str]]:
        """Return time, group and text of the lines of `keepstep run`."""
        file = self.folder / "logs" / "run.log"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [match for line in lines if (match := re.match(r"(\S+ \S+) (\S+): (.*)", line))]
        return [(datetime.fromisoformat(one[1]).timestamp(), one[2], one[3]) for one in found]

    def events(self, group: int) -> list[dict[str, object]]:
        """Return the step log of a group."""
        file = self.folder / "steps.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in records if str(one["replica_id"]).startswith(f"r{group}:")]

    @staticmethod
    def _until(ready: object, problem: str, limit: float = LIMIT_SECONDS) -> None:
        deadline = time.monotonic() + limit
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem} within {limit:g} s")
            time.sleep(POLL)  # files announce nothing


def parts_of_keepstep(job: Job, group: int, killed: float, times: dict[str, float]) -> Back:
    notes = [(when, text) for when, name, text in job.notes() if name == f"r{group}" and when > killed - 0.001]
    noticed = next(when for when, text in notes if text.startswith("rank 0 was killed"))
    pause = next(match for _, text in notes if (match := re.match(r"restart \d+ of \d+ (?:in ([\d.]+) s|now)", text)))
    seconds = float(pause[1] or 0)
    own = [one for one in job.events(group) if times["manager"] - 1 < one["t"] <= times["commit"] + 0.001]
    quorum = next(one["t"] for one in own if one["event"] == "quorum" and one["t"] > times["imports"])
    healed = next((one["t"] for one in own if one["event"] == "healed" and one["t"] > times["imports"]), quorum)
    ends = [killed, noticed, noticed + seconds, times["script"], times["imports"], times["manager"], quorum, healed]
    ends.append(times["commit"])
    found = {part: end - begin for part, (begin, end) in zip(PARTS, pairwise(ends), strict=True)}
    return {**found, "total": times["commit"] - killed}


def parts_of_torchft(killed: float, times: dict[str, float]) -> Back:
    ends = [killed, times["script"], times["imports"], times["manager"], times["commit"]]
    names = ("start", "imports", "session", "quorum, heal, step")
    found = {part: end - begin for part, (begin, end) in zip(names, pairwise(ends), strict=True)}
    return {**found, "total": times["commit"] - killed}


@contextlib.contextmanager
def under_keepstep_run(
    side: Side,
    job: Job,
    log: Path,
    flags: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    compute: float = 0.0,
    **variables: str,
) -> Iterator[None]:
    command = [side.python, "-m", "keepstep_cli", "run", "--replicas", str(GROUPS), "--log-dir", job.folder / "logs"]
    command += [*flags, "--", HERE / "way_back_trainer.py", "keepstep", job.folder, str(compute), *also]
    environment = {**side.environment(), "KEEPSTEP_STEP_LOG": str(job.folder / "steps.jsonl"), **variables}
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        job.until_all_commit(time.time())
        if "--cold" not in flags:
            job.until_noted("restarts are warm from now on")
        yield
    finally:
        stop(process)


@contextlib.contextmanager
def under_torchft(side: Side, job: Job, log: Path, compute: float = 0.0) -> Iterator[None]:
    over = threading.Event()
    running: dict[int, subprocess.Popen[bytes]] = {}

    def keep(group: int, address: str) -> None:
        environment = {**side.environment(), "REPLICA_GROUP_ID": str(group), "TORCHFT_LIGHTHOUSE": address}
        command = [side.python, HERE / "way_back_trainer.py", "torchft", job.folder, str(compute)]
        while not over.is_set():
            with log.open("ab") as out:
                running[group] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
            running[group].wait()

    with lighthouse(side, min_replicas=1, log=log) as server:
        keepers = [threading.Thread(target=keep, args=(group, server.address)) for group in range(GROUPS)]
        for one in keepers:
            one.start()
        try:
            job.until_all_commit(time.time())
            yield
        finally:
            over.set()
            for process in running.values():
                process.kill()
            for one in keepers:
                one.join(10)


def measure(side: Side, kills: int, log: Path, *flags: str, also: tuple[str, ...] = ()) -> list[Back]:
    found: list[Back] = []
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name))
        ours = side.name == "keepstep"
        with under_keepstep_run(side, job, log, flags, also) if ours else under_torchft(side, job, log):
            began = dict.fromkeys(range(GROUPS), time.monotonic())
            for turn in range(kills):
                group = turn % GROUPS
                time.sleep(max(0.0, began[group] + LIFE_SECONDS - time.monotonic()))  # a life of that length
                job.until_all_commit(time.time())
                old = set(job.of_group(group))
                pid = job.newest(group)
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
                _, times = job.until_commit(group, old)
                began[group] = time.monotonic()
                back = parts_of_keepstep(job, group, killed, times) if ours else parts_of_torchft(killed, times)
                found.append(back)
                print(f"{back['total']:.2f}", end=" ", flush=True)
    print()
    return found


def show(rows: dict[str, list[Back]]) -> None:
    """Print the median of each part."""
    table = Table(title="way back of a killed group, medians in ms")
    names = [*PARTS, "quorum, heal, step", "total"]
    for column in ("", *names, "p95"):
        table.add_column(column, justify="left" if not column else "right")
    for title, backs in rows.items():
        cells = [f"{1e3 * p50([one[name] for one in backs]):.0f}" if name in backs[0] else "" for name in names]
        table.add_row(title, *cells, f"{1e3 * p95([one['total'] for one in backs]):.0f}")
    Console(width=None if os.isatty(1) else 140).print(table)


def run(ours: Side, theirs: Side, *, quick: bool, log: Path) -> list[Figure]:
    kills, few = (QUICK_KILLS, QUICK_KILLS) if quick else (KILLS, SLOW_KILLS)
    missing = [name for name in HEAVY if importlib.util.find_spec(name) is None]
    rows: dict[str, list[Back]] = {}
    plans = [("torchft", theirs, few, (), ()), ("keepstep, cold", ours, few, ("--cold",), ())]
    plans.append(("keepstep, warm", ours, kills, (), ()))
    if missing:
        print(f"way back with {' and '.join(HEAVY)}: skipped, not installed: {', '.join(missing)}")
    else:
        plans.append(("keepstep, cold, transformers and lightning", ours, few, ("--cold",), HEAVY))
        plans.append(("keepstep, warm, transformers and lightning", ours, kills, (), HEAVY))
    for title, side, count, flags, also in plans:
        print(f"way back, {title}, {count} times:", end=" ", flush=True)
        rows[title] = measure(side, count, log, *flags, also=also)
    show(rows)
    totals = {title: [one["total"] for one in backs] for title, backs in rows.items()}
    definition = "seconds from SIGKILL of one of three groups to its own next commit, restarted by `keepstep run`"
    parts = {title: {name: p50([one[name] for one in backs]) for name in backs[0]} for title, backs in rows.items()}
    figures = [
        Figure("way back, warm start", "s", "p50", totals["keepstep, warm"], totals["torchft"],
               Limit(value=0.5, times_theirs=0.17), definition=definition, also={"parts_p50_s": parts}),
        Figure("way back, warm start, p95", "s", "p95", totals["keepstep, warm"], totals["torchft"], Limit(value=0.8),
               definition=definition),
        Figure("way back, cold start", "s", "p50", totals["keepstep, cold"], totals["torchft"], definition=definition),
    ]  # fmt: skip
    if not missing:
        cold, warm = (totals[f"keepstep, {how}, transformers and lightning"] for how in ("cold", "warm"))
        limit = Limit(value=0.1 * p50(cold))
        figures.append(
            Figure(
                "way back, warm start, with transformers and lightning",
                *("s", "p50", warm),
                limit=limit,
                definition=f"{definition}; limit: 0.1 of a cold start",
                also={"cold_p50_s": p50(cold), "cold_s": cold},
            )
        )
    return figures
