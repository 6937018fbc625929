"""A group that hangs is named with its rank and line, and ended; one that works slowly, or says so, is not."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from keepstep_mesh.exit_codes import EXIT_COLLECTIVES_DIFFER, EXIT_GROUP_FAILED, EXIT_HUNG
from tests.support.jobs.job import DEADLINE, HANGING, Group, Job
from tests.support.processes.forked import FORKS
from tests.support.services.command import Command

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

LIMIT = "--hang-after=4"


async def hung(job: Job) -> dict[str, Any]:
    """Wait for the event of a hang, and return it."""
    async with asyncio.timeout(120):
        while True:
            for event in (await job.order("GET", "/events"))["events"]:
                if event["kind"] == "hung":
                    return event
            await asyncio.sleep(0.2)  # the lighthouse has no event that a test could wait for here


async def late(job: Job, word: str, seconds: int) -> str:
    """Wait until a sentence with ``word`` names who holds up the job for ``seconds`` or longer, and return it."""
    async with asyncio.timeout(120):
        while True:
            for sentence in (await job.order("GET", "/quorum"))["hangs"]:
                if word in sentence and int(re.findall(r" for (\d+) s", sentence)[0]) >= seconds:
                    return sentence
            await asyncio.sleep(0.2)


async def assert_nothing_hung(job: Job) -> None:
    assert [event for event in (await job.order("GET", "/events"))["events"] if event["kind"] == "hung"] == []
    job.assert_all_live()


async def two_groups(job: Job, **environment: str) -> tuple[Group, Group]:
    order = {"TRAINER_HANG": str(job.directory / "order"), **environment}
    quiet = {**order, "TRAINER_HANG": str(job.directory / "no-order")}
    a, b = await job.start("a", **quiet), await job.start("b", **order)
    await job.advance(a, b, steps=6)
    return a, b


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("loop", "while True:"),
        ("lock", "lock.acquire()"),
        ("loader", "next(batches)"),
        ("fifo", ".read_bytes()"),
    ],
)
async def test_a_group_that_hangs_is_named_with_its_line_and_ended_and_the_other_one_goes_on(
    kind: str, line: str
) -> None:
    async with Job(LIMIT) as job:
        os.mkfifo(job.directory / "fifo")
        a, b = await two_groups(job, TRAINER_FIFO=str(job.directory / "fifo"))
        (job.directory / "order").write_text(kind)
        event = await hung(job)
        assert event["replica_id"].startswith("b:")
        assert line in event["detail"]["line"]
        assert event["detail"]["ended"] is True
        assert await b.exit_codes() == [EXIT_HUNG]
        assert any("this group hangs: b:" in text for text in b.output)
        assert any("in hang" in text or "in busy" in text for text in b.output)  # the stacks
        (job.directory / "order").unlink()
        await job.advance(a, steps=20)


async def test_a_declared_section_is_no_hang_and_is_named() -> None:
    async with Job(LIMIT) as job:
        a, b = await two_groups(job)
        (job.directory / "order").write_text("section")
        sentence = await late(job, "in the section 'evaluate'", 8)
        assert sentence.startswith("b:")
        for command in ("status", "jobs", "replicas", "inspect b"):
            run = Command(
                job.directory, *command.split(), "--lighthouse", job.address, deadline=DEADLINE, COLUMNS="300"
            )
            assert run.wait() == 0
            assert any("rank 0 is in the section 'evaluate'" in text for text in run.lines), run.lines
            run.close()
        (job.directory / "order").unlink()
        await job.advance(a, b)
        await assert_nothing_hung(job)


async def test_work_whose_stack_changes_is_no_hang_and_is_named() -> None:
    async with Job(LIMIT) as job:
        a, b = await two_groups(job)
        (job.directory / "order").write_text("slow")
        sentence = await late(job, "time.sleep(0.2)", 8)
        assert sentence.startswith("b:")
        (job.directory / "order").unlink()
        await job.advance(a, b)
        await assert_nothing_hung(job)


async def test_a_long_first_step_is_no_hang_and_is_named() -> None:
    async with Job(LIMIT) as job:
        quiet = {"TRAINER_HANG": str(job.directory / "order"), "TRAINER_COMPILE": "15"}
        a, b = await job.start("a", **quiet), await job.start("b", **quiet)
        await job.until(lambda: a.lines and b.lines, "both have joined the job")
        await late(job, "as a compilation does", 8)
        await job.advance(a, b)
        await assert_nothing_hung(job)


async def test_a_group_that_hangs_before_its_first_step_is_ended_and_the_other_one_goes_on() -> None:
    """It has thirty times the limit, half a minute here."""
    async with Job("--hang-after=1") as job:
        quiet = {"TRAINER_HANG": str(job.directory / "no-order")}
        a, b = await job.start("a", **quiet), await job.start("b", **quiet, TRAINER_PREPARE="10000")
        await job.until(lambda: a.lines and b.lines, "both have joined the job")
        sentence = await late(job, "time.sleep(float(", 5)
        assert sentence.startswith("b:")
        event = await hung(job)
        assert event["replica_id"].startswith("b:")
        assert event["detail"]["ended"] is True
        assert event["detail"]["seconds"] >= 30
        assert await b.exit_codes() == [EXIT_HUNG]
        await job.advance(a, steps=3)


async def test_groups_that_all_stand_in_one_line_are_not_ended() -> None:
    async with Job(LIMIT) as job:
        os.mkfifo(job.directory / "fifo")
        both = {"TRAINER_HANG": str(job.directory / "order"), "TRAINER_FIFO": str(job.directory / "fifo")}
        a, b = await job.start("a", **both), await job.start("b", **both)
        await job.advance(a, b, steps=6)
        (job.directory / "order").write_text("fifo")
        event = await hung(job)
        assert event["detail"]["ended"] is False
        assert "all groups stand in one line" in event["detail"]["spared"]
        (job.directory / "order").unlink()
        (job.directory / "fifo").write_bytes(b"")
        job.assert_all_live()


async def test_the_rank_of_a_group_that_hangs_before_a_collective_of_its_group_is_named() -> None:
    async with Job(LIMIT) as job:
        order = {"TRAINER_HANG": str(job.directory / "order"), "TRAINER_HANG_RANK": "1"}
        quiet = {**order, "TRAINER_HANG": str(job.directory / "no-order")}
        a = await job.start("a", ranks=2, **quiet)
        b = await job.start("b", ranks=2, **order)
        await job.advance(a, b, steps=6)
        (job.directory / "order").write_text("lock")
        event = await hung(job)
        assert (event["replica_id"][:2], event["detail"]["rank"]) == ("b:", 1)
        assert "lock.acquire()" in event["detail"]["line"]
        assert EXIT_HUNG in await b.exit_codes()
        (job.directory / "order").unlink()
        await job.advance(a, steps=20)


async def test_stacks_can_be_read_at_any_time() -> None:
    async with Job() as job:
        a, b = await two_groups(job)
        found = await job.order("GET", "/stacks?group=a")
        [group] = found["groups"]
        [rank] = group["ranks"]
        assert rank["stacks"][0]["thread"] == "MainThread"
        assert any("hanging_trainer.py" in frame for frame in rank["stacks"][0]["frames"])
        assert not group["silent"]
        assert len((await job.order("GET", "/stacks"))["groups"]) == 2
        await job.advance(a, b)


async def test_a_group_of_which_one_rank_is_stopped_is_lost_and_the_other_one_goes_on() -> None:
    async with Job(LIMIT) as job:
        quiet = {"TRAINER_HANG": str(job.directory / "no-order")}
        a, b = await job.start("a", ranks=2, **quiet), await job.start("b", ranks=2, **quiet)
        await job.advance(a, b, steps=6)
        b.kill(1, signal.SIGSTOP)
        await job.advance(a, steps=20)
        await job.until(lambda: b.ranks[0].exit_code is not None, "rank 0 of b ends")
        assert b.ranks[0].exit_code == EXIT_GROUP_FAILED
        assert any("rank 1 was silent for" in text for text in b.output)
        assert b.ranks[1].exit_code is None  # `keepstep run` kills a rank that is stopped


async def test_a_collective_over_the_groups_that_one_of_them_leaves_out_is_named() -> None:
    async with Job(LIMIT) as job:
        a, b = await two_groups(job, TRAINER_TIMEOUT="20")
        (job.directory / "order").write_text("skip")
        sentence = await late(job, "all-reduce 2 of 2", 4)
        assert sentence.startswith("a:")
        assert "went on without it: b:" in sentence
        assert await b.exit_codes() == [EXIT_COLLECTIVES_DIFFER]
        assert await a.exit_codes() == [EXIT_COLLECTIVES_DIFFER]  # the counts do not tell which of two is wrong


@pytest.mark.parametrize("kind", ["hang", "hang-loop"])
async def test_an_injected_hang_is_found_like_any_other(kind: str) -> None:
    async with Job(LIMIT) as job:
        a, b = await two_groups(job, KEEPSTEP_CHAOS=str(job.directory / "orders"))
        at = urlsplit((await job.order("GET", "/replicas/b"))["address"]).netloc
        inject = Command(job.directory, "inject", kind, "--at", at, "--seconds", "300", deadline=DEADLINE)
        event = await hung(job)
        assert event["replica_id"].startswith("b:")
        assert "optimizer.zero_grad()" in event["detail"]["line"]
        assert await b.exit_codes() == [EXIT_HUNG]
        assert inject.wait() == 0, inject.lines
        inject.close()
        await job.advance(a, steps=20)


def test_run_kills_a_rank_whose_interpreter_is_locked_and_starts_it_again(tmp_path: Path) -> None:
    order = tmp_path / "order"
    flags = ["--replicas", "2", "--hang-after", "10", "--"]
    variables = {"TRAINER_HANG": str(order), FORKS: "1"}
    run = Command(tmp_path, "run", *flags, str(HANGING), deadline=DEADLINE, **variables)
    try:
        run.wait_for(r'r1/0\].*"committed", .*"step": 6,')
        order.write_text("gil 1")
        run.wait_for(r"r1/0\].*in hang$")  # its stacks
        run.wait_for(r"rank 0 has run no Python code for 10 s, because a thread does not let go of the interpreter")
        order.unlink()
        run.wait_for(r"r1\].*started again")
        run.wait_for(r'r1/0\].*"committed"')
        assert any("has run no Python code for 10 s" in line for line in run.lines)
    finally:
        run.close()
