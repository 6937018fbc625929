"""Orders of an administrator, as real trainers and `keepstep run` carry them out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from itertools import pairwise

import pytest

from tests.support.jobs.job import DEADLINE, TRAINER, Group, Job, discarded
from tests.support.processes.forked import FORKS

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

PATIENT = ("--reconnect-grace", "30", "--join-timeout", "30", "--heartbeat-timeout", "30")
"""Flags with which the other groups wait 30 s for a group that is gone without a leave."""


async def tell_to_leave(job: Job, group: Group, how: str) -> None:
    if how == "drain":
        event = await job.order("POST", f"/replicas/{group.name}/drain", reason="new machine")
        assert event["kind"] == "drain"
    else:
        group.kill(number=signal.SIGTERM)


@pytest.mark.parametrize("how", ["drain", "SIGTERM"])
async def test_a_planned_replacement_costs_no_step_and_nobody_waits(how: str) -> None:
    async with Job(*PATIENT) as job:
        a, b = [await job.start(name) for name in ("a", "b")]
        await job.advance(a, b)
        failed_before = len(discarded(a, b))
        since = max(a.step(), b.step())
        c = await job.start("c")
        await job.until(c.step, "the replacement commits")
        await job.advance(a, b, c)
        await tell_to_leave(job, a, how)
        assert await a.exit_codes() == [0]
        await job.advance(b, c, steps=20)

        assert len(discarded(a, b, c)) == failed_before, job.report()
        (left,) = [event for event in a.lines if event["event"] == "left"]
        assert left["reason"] == ("new machine" if how == "drain" else "SIGTERM")
        assert left["step"] == a.step(), "it finished the step that it was in"
        logs = {name: (job.logs / f"{name}.jsonl").read_text().splitlines() for name in "abc"}
        steps = {name: [json.loads(line) for line in lines] for name, lines in logs.items()}
        for mine in steps.values():
            assert not [one for one in mine if one["event"] == "discarded" and one["step"] >= since]
        for mine in (steps["b"], steps["c"]):
            times = [one["t"] for one in mine if one["event"] == "committed" and one["step"] > since]
            gaps = [later - earlier for earlier, later in pairwise(times)]
            assert max(gaps) < 10, "a wait for a group takes 30 s; a step and a join take less than one"
        kinds = [event["kind"] for event in (await job.order("GET", "/events"))["events"]]
        assert not {"lost", "suspect", "round_broken", "denied"} & set(kinds)
        assert kinds.count("left") == 1
        assert job.assert_identical() > 20


async def test_leaving_costs_nothing_those_who_are_still_at_the_step_when_the_grace_is_over() -> None:
    async with Job("--reconnect-grace", "0.1") as job:
        a = await job.start("a")
        b = await job.start("b", TRAINER_PACE="0.5")
        await job.advance(a, b, steps=3)
        failed_before = len(discarded(a, b))
        await tell_to_leave(job, a, "drain")
        assert await a.exit_codes() == [0]
        await job.advance(b, steps=3)
        assert len(discarded(a, b)) == failed_before, job.report()
        assert job.assert_identical() >= 3


async def test_all_ranks_of_a_drained_group_exit_0() -> None:
    async with Job(*PATIENT) as job:
        a, b = [await job.start(name, ranks=2) for name in ("a", "b")]
        await job.advance(a, b)
        failed_before = len(discarded(a, b))
        await tell_to_leave(job, b, "drain")
        assert await b.exit_codes() == [0, 0]
        await job.advance(a)
        assert len(discarded(a, b)) == failed_before, job.report()


async def test_all_ranks_of_an_evicted_group_exit_77() -> None:
    async with Job() as job:
        a, b = [await job.start(name, ranks=2) for name in ("a", "b")]
        await job.advance(a, b)
        await job.order("POST", "/replicas/b/evict", reason="bad GPU", ban_seconds=1000)
        assert await b.exit_codes() == [77, 77]
        await job.advance(a)


async def test_an_evicted_group_exits_77_and_is_not_let_in_before_its_ban_is_lifted() -> None:
    async with Job() as job:
        a, b = [await job.start(name) for name in ("a", "b")]
        await job.advance(a, b)
        event = await job.order("POST", "/replicas/b/evict", reason="bad GPU", ban_seconds=1000)
        assert await b.exit_codes() == [77]
        assert any(line["event"] == "left" and line["reason"] == "bad GPU" for line in b.lines)
        await job.advance(a)
        assert len(discarded(a)) <= 1, "it cost the others the step that it was evicted in"
        await job.start("b")
        assert await b.exit_codes() == [77], "a new incarnation is not let in"
        assert [ban["target"] for ban in (await job.order("GET", ""))["bans"]] == ["b"]
        assert (await job.order("POST", "/replicas/b/readmit"))["id"] > event["id"]
        await job.start("b")
        await job.advance(a, b)
        assert job.assert_identical() >= 5


async def test_keepstep_run_starts_an_evicted_group_when_its_ban_is_over() -> None:
    async with Job(min_replicas=1) as job:
        flags = ["--cold", "--replicas", "2", "--lighthouse", job.address]
        command = [sys.executable, "-m", "keepstep_cli", "run", *flags, "--"]
        run = await asyncio.create_subprocess_exec(
            *command,
            str(TRAINER),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2**20,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "KEEPSTEP_STEP_LOG": str(job.logs / "run.jsonl"), FORKS: "1"},
        )
        assert run.stdout is not None
        said: list[str] = []

        async def line_with(*words: str) -> str:
            async with asyncio.timeout(DEADLINE):
                while text := (await run.stdout.readline()).decode().rstrip():
                    said.append(text)
                    if all(word in text for word in words):
                        return text
            raise AssertionError(f"nothing with {words} in\n" + "\n".join(said[-50:]))

        try:
            await line_with("[r1/0]", '"committed"')
            await line_with("[r0/0]", '"committed"')
            await job.order("POST", "/replicas/r1/evict", reason="bad GPU", ban_seconds=6)
            (ban,) = (await job.order("GET", ""))["bans"]
            await line_with("[r1] rank 0 exited with 77")
            await line_with("[r1] evicted, not started again: banned for")
            await line_with("[r0/0]", '"committed"')
            await line_with("[r1] restart 1 of")
            started = json.loads((await line_with("[r1/0]", '"started"')).removeprefix("[r1/0] "))
            assert started["t"] >= ban["until"]
            await line_with("[r1/0]", '"committed"')
            assert sum("[r1/0]" in text and '"started"' in text for text in said) == 2
        finally:
            run.terminate()
            async with asyncio.timeout(DEADLINE):
                await run.communicate()
        assert run.returncode == 128 + signal.SIGTERM
