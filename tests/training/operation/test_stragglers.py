"""Real trainers, one of which is slow: what the policy ``drain_straggler_after`` makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs.job import Job, discarded
from tests.support.services.metrics_driver import client, metrics_process

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

STEPS = 8
SLOW = "0.3"
"""Seconds slept a step; the others sleep 0.03."""


async def drains(job: Job) -> list[dict[str, Any]]:
    return [event for event in (await job.order("GET", "/events"))["events"] if event["kind"] == "drain"]


async def test_a_slow_group_leaves_after_so_many_steps_and_again_when_it_comes_back_as_slow() -> None:
    async with (
        Job("--drain-straggler-after", str(STEPS), "--initial-replicas", "3", min_replicas=2) as job,
        metrics_process("--lighthouse", job.address) as (_, url),
        client(url) as asking,
    ):
        a, b, c = await job.start("a"), await job.start("b"), await job.start("c", TRAINER_PACE=SLOW)
        assert await c.exit_codes() == [0]
        (left,) = [event for event in c.lines if event["event"] == "left"]
        (event,) = await drains(job)
        assert event["replica_id"].startswith("c:")
        assert event["detail"] == {"reason": left["reason"], "by": "admin at 127.0.0.1"}  # without tokens all are
        assert left["reason"].startswith("it was a straggler for ")
        assert len(c.committed()) > STEPS
        await job.advance(a, b, steps=20)

        c = await job.start("c", TRAINER_PACE=SLOW)
        assert await c.exit_codes() == [0]
        assert len(c.committed()) > STEPS, "it has trained in between"
        assert len(await drains(job)) == 2
        await job.advance(a, b, steps=20)
        told = [one["event"] for one in (await asking.get("events", "default"))["events"]]
        assert told.index("straggler") < told.index("drain")
        spent = (await asking.get("goodput", "default"))["seconds"]
        assert spent["waiting_slow_group"] > STEPS * float(SLOW), spent  # a and b wait for c, twice and longer
        assert not discarded(a, b, c), job.report()
        assert job.assert_identical() > STEPS
