"""``make faults`` as a command: one short row, a broken promise, and Ctrl-C in the middle of a row."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.outcome import Limit, Outcome, table
from tests.faults.row import Row, Run
from tests.faults.rows import ROWS
from tests.support.jobs.job import Group, Job
from tests.support.jobs.samples import taken_once
from tests.support.network.namespaces import FOLDER
from tests.support.processes.forked import FORKS
from tests.support.services.command import killed_at_the_end

DEADLINE = 120.0


def faults(repository: Path, *flags: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    command = (sys.executable, "-u", "-m", "tests.faults", *flags)
    return killed_at_the_end(*command, cwd=repository, stderr=subprocess.STDOUT, env=os.environ | {FORKS: "1"})


@pytest.mark.training
@pytest.mark.timeout(300)
async def test_a_row_runs_and_is_recorded(repository: Path, tmp_path: Path) -> None:
    flags = ("--only", "sessions_closed", "--times", "2", "--results", str(tmp_path))
    async with faults(repository, *flags) as process, asyncio.timeout(DEADLINE):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["name"] == "sessions_closed"
    assert len(row["seconds"]) == 2
    assert (row["exited"], row["violations"], row["broken"]) == ([], 0, [])
    assert row["compared"] > 0
    assert f"| {ROWS['sessions_closed'].what} | 2 |" in said.decode()
    assert list((tmp_path / "sessions_closed" / "logs").glob("*.jsonl"))


@pytest.mark.training
@pytest.mark.timeout(300)
async def test_ctrl_c_in_the_middle_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    flags = ("--only", "leader_without_etcd", "--results", str(tmp_path))
    async with faults(repository, *flags) as process, asyncio.timeout(DEADLINE):
        started = psutil.Process(process.pid)
        # the fork server, etcd, lighthouses, groups
        while len(children := started.children(recursive=True)) < 6:  # noqa: ASYNC110 - a new process is no event
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = await process.communicate()
        assert process.returncode == 130, said.decode()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE)
    assert not alive
    assert not list(FOLDER.glob(f"keepstep-{process.pid}-*"))


async def test_an_error_in_a_row_is_a_broken_promise() -> None:
    async def fail(_: Run) -> None:
        raise AssertionError("not seen\nand what was printed")

    said: list[str] = []
    outcome = await Run(Row("x", "something", 1, fail), 1, proxies=True, say=said.append, keep=None).play()
    assert outcome.broken == ["AssertionError: not seen"]
    assert "and what was printed" in said[0]


async def test_the_violations_of_a_history_are_counted() -> None:
    line = {"job": "job", "replica_id": "r0:1", "group_rank": 0, "event": "started", "step": 0, "lineage": "r0:1"}
    job = Job()
    with pytest.raises(AssertionError, match="gap"):
        async with job:
            lines = [json.dumps({**line, "n": n, "epoch": 0, "quorum_id": 0}) for n in (1, 3)]
            (job.logs / "r0.jsonl").write_text("\n".join([*lines, ""]))
    one = Outcome("x", "something", 1, None)
    one.take(job.history)
    assert one.violations == 1


def test_a_sample_that_no_committed_step_has_or_two_have_is_named() -> None:
    def trains(step: int, quorum_id: int, *samples: int) -> dict[str, Any]:
        return {"event": "trains", "step": step, "quorum_id": quorum_id, "epoch": 0, "samples": [*samples]}

    def committed(step: int, quorum_id: int) -> dict[str, Any]:
        return {"event": "committed", "step": step, "quorum_id": quorum_id}

    one = Group("a", lines=[trains(1, 1, 5, 6), committed(1, 1), trains(2, 1, 7), committed(2, 1)])
    killed = Group("b", lines=[trains(1, 1, 8), trains(2, 1, 9)])
    end = {"event": "ended", "epoch": 0}
    assert taken_once(Group("a", lines=[*one.lines, end]), killed) == 1
    repeated = [*one.lines, trains(2, 2, 7, 9), committed(2, 2)]
    assert taken_once(Group("a", lines=repeated), killed) == 0, "without b, whose samples are in the repetition"
    with pytest.raises(AssertionError, match=r"\(0, 7\): 2"):
        taken_once(Group("a", lines=[*one.lines, trains(3, 1, 7), committed(3, 1)]), killed)
    other = [{**trains(3, 1, 1), "epoch": 1}, committed(3, 1), {"event": "ended", "epoch": 1}]
    with pytest.raises(AssertionError, match=r"\(1, 5\): 0"):
        taken_once(Group("a", lines=[*one.lines, *other]), killed)


def test_broken_promises_are_listed() -> None:
    one = Outcome("x", "something", 3, Limit("p95", 1.0), seconds=[0.1, 0.2, 3.0], exited=["b"], compared=5)
    one.judge()
    assert one.broken == ["trainers exited: b", "p95 is 3.00 s (limit 1 s)"]
    assert "**broken**" in table([one])


def test_a_row_with_too_few_repetitions_or_comparisons_is_broken() -> None:
    few = Outcome("x", "something", 3, None, seconds=[0.1], compared=5)
    nothing = Outcome("x", "something", 1, None, seconds=[0.1])
    for one in (few, nothing):
        one.judge()
    assert few.broken == ["repeated 1 times of 3"]
    assert nothing.broken == ["no weights were compared"]


def test_an_outcome_is_a_row_of_the_table() -> None:
    one = Outcome("x", "something", 2, Limit("worst", 1.0), "it lives", seconds=[0.1, 0.2], compared=1234)
    one.steps, one.epochs = 2000, 3
    one.judge()
    assert one.broken == []
    cells = "something", "2", "it lives; gap: worst at most 1 s", "0.15 / 0.20 / 0.20 s"
    told = "2,000 steps, 3 epochs", "1,234"
    assert table([one]).splitlines()[2] == f"| {' | '.join((*cells, *told))} |"
