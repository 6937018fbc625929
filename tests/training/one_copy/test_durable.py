"""Durable checkpoints of a model that exists once: a job goes on from them when no living rank can rebuild a shard.

Slow: each test trains in several processes, some of which start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from keepstep.checkpoint import load
from keepstep_mesh.exit_codes import EXIT_STATE_MISMATCH
from tests.support.jobs.job import Group
from tests.support.jobs.one_copy_job import SECONDS, OneCopyJob, told, undisturbed
from tests.support.services.relay_driver import relay_process

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]


class DurableJob(OneCopyJob):
    relay = ""

    def check_history(self) -> None:
        super(OneCopyJob, self).check_history()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.logs / "events.jsonl").read_text().splitlines())
        return [one["detail"] for one in lines if one["kind"] in kinds]

    def losses(self) -> dict[int, float]:
        """The loss of each committed step; that of a repeated one is nearly the same."""
        lines = [event for group in self.groups.values() for event in group.lines]
        return {event["step"]: event["loss"] for event in lines if event["event"] == "committed"}


def ends_of(job: OneCopyJob) -> list[dict[str, Any]]:
    return [event for group in job.groups.values() for event in group.lines if event["event"] == "closed"]


@contextlib.asynccontextmanager
async def durable_job(*flags: str, members: int) -> AsyncIterator[DurableJob]:
    async with (
        DurableJob(*flags, min_replicas=members) as job,
        relay_process("--lighthouse", job.address, "--data-dir", str(job.directory / "relay")) as (_, relay),
    ):
        job.relay = relay
        yield job


async def test_a_member_lost_with_its_keeper_costs_the_steps_since_the_checkpoint() -> None:
    expected, shards, _ = await undisturbed(4, steps=12)
    async with durable_job(members=4) as job:
        ends = await job.train(4, faults="7:1:backward,7:2:backward", steps=12, every=4)
        assert job.faults() == 2, job.report()
        assert job.shards() == shards, "also those of repeated steps"
        assert told(ends) == expected, job.report()
        (newest,) = {event["id"] for event in ends_of(job)}
        weight, moment = torch.zeros(30, 30), torch.zeros(30, 30)
        optim = {"state": {"layers.2.weight": {"exp_avg": moment}}}
        state = {"user": {"model": {"layers.2.weight": weight}, "optim": optim}, "manager": {"step": 0}}
        await asyncio.to_thread(load, state, f"{job.relay}/v1/jobs/default/checkpoints/{newest}")
        assert state["manager"]["step"] == 12, "finish() has waited for it"
        assert weight.any(dim=1).all(), "the shards of all ranks"
        assert moment.any(dim=1).all()
        (world,) = [one for one in job.events("world_formed") if one["how"] == "resumed"]
        assert (world["step"], world["went_back"]) == (4, 3)
        (back,) = job.events("went_back")
        assert (back["from"], back["to"], back["lost_steps"]) == (7, 4, 3)


async def test_ranks_that_are_left_resume_without_the_lost_ones_and_take_them_in_later() -> None:
    _, _, losses = await undisturbed(3, kind="clip", steps=12)
    async with durable_job("--initial-replicas", "4", members=2) as job:
        await job.train(4, kind="clip", faults="7:1:backward,7:2:backward", steps=12, every=4)
        assert job.faults() == 2, job.report()
        assert job.losses() == pytest.approx(losses, rel=1e-5)
        assert [one["how"] for one in job.events("world_formed")][:2] == ["fresh", "resumed"]


async def test_a_job_that_is_started_again_resumes_with_another_number_of_ranks() -> None:
    _, _, losses = await undisturbed(3, kind="clip", steps=12)
    async with durable_job(members=3) as job:
        faults = ",".join(f"7:{rank}:backward" for rank in range(4))
        for number in range(4):
            await job.start(f"m{number}", **job.variables(4, kind="clip", faults=faults, steps=8, every=4))
        await job.until(lambda: job.faults() == 4, "all are killed", SECONDS)
        first = job.losses()
        assert first == pytest.approx({step: losses[step] for step in range(1, 8)}, rel=1e-5)
        for group in job.groups.values():
            await group.gone()
            group.lines.clear()
        await job.train(3, kind="clip", steps=8, every=4)
        assert job.losses() == pytest.approx({step: losses[step] for step in range(5, 9)}, rel=1e-5)
        assert [one["how"] for one in job.events("world_formed")] == ["fresh", "resumed"]
        (back,) = job.events("went_back")
        assert (back["from"], back["to"]) == (7, 4)


async def test_a_resume_that_fails_on_the_way_begins_again_and_the_job_goes_back_once() -> None:
    expected, shards, _ = await undisturbed(4, steps=12)
    async with durable_job(members=4) as job:
        ends = await job.train(4, faults="7:1:backward,7:2:backward,7:0:ending", steps=12, every=4)
        assert job.faults() == 3, job.report()
        assert job.shards() == shards, "also those of repeated steps"
        assert told(ends) == expected, job.report()
        assert [(one["from"], one["to"]) for one in job.events("went_back")] == [(7, 4)]


@pytest.mark.parametrize("other", ["plain", "muon"])
async def test_a_job_that_is_stopped_after_a_step_that_is_stored_resumes_at_this_step_with_the_same_model(
    other: str,
) -> None:
    async with durable_job(members=3) as job:

        async def start(kind: str) -> list[Group]:
            variables = job.variables(3, kind=kind, steps=500, every=1)
            return [await job.start(f"m{number}", **variables) for number in range(3)]

        groups = await start("clip")
        await job.until(lambda: max(job.losses(), default=0) >= 4, "steps", SECONDS)
        for one in groups:
            one.kill(number=signal.SIGTERM)
        for one in groups:
            assert await one.exit_codes() == [0], job.report()
        last = max(job.losses())
        for one in groups:
            await one.gone()
            one.lines.clear()
        for one in await start(other):
            assert await one.exit_codes() == [EXIT_STATE_MISMATCH], job.report()
            await one.gone()
            one.lines.clear()
        assert "durable checkpoint does not fit: build() returns another model" in job.report()
        await job.train(3, kind="clip", steps=last + 2, every=1)
        assert not job.events("went_back")
        (resumed,) = [one for one in job.events("world_formed") if one["how"] == "resumed"]
        assert resumed["step"] == last
