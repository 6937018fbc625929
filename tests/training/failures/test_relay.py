"""A job whose groups heal through a relay, which is killed in the middle of a heal."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import psutil
import pytest

from tests.support.jobs.job import DEADLINE, Group, Job
from tests.support.services.relay_driver import metric, relay_process

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

SEVERAL_CHUNKS = {"TRAINER_WIDTH": "12000"}
"""10 MiB of state."""


def healed(job: Job, group: Group) -> list[int]:
    """Bytes of each heal of it."""
    lines = [json.loads(line) for line in (job.logs / f"{group.name}.jsonl").read_text().splitlines()]
    return [line["bytes"] for line in lines if line["event"] == "healed"]


async def asks(group: Group, url: str) -> None:
    """Returns when a process of the group has a connection to ``url``."""
    port, process = int(url.rsplit(":", 1)[1]), psutil.Process(group.ranks[0].pid)
    async with asyncio.timeout(DEADLINE):
        while not any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # no event says so


async def test_a_killed_group_heals_through_the_relay_and_without_it_when_that_is_killed_too() -> None:
    async with Job() as job, relay_process("--lighthouse", job.address) as (relay, url):
        async with asyncio.timeout(DEADLINE):
            while not await metric(url, "registered"):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.02)
        a, b, c = [await job.start(name, **SEVERAL_CHUNKS) for name in ("a", "b", "c")]
        await job.advance(a, b, c)

        c.kill()
        await job.advance(a, b)
        before, heals = await metric(url, "sent_bytes_total"), len(healed(job, c))
        await job.start("c", **SEVERAL_CHUNKS)
        await job.advance(a, b, c)
        assert await metric(url, "sent_bytes_total") - before >= healed(job, c)[heals] > 2 * 2**20

        c.kill()
        await job.advance(a, b)
        heals = len(healed(job, c))
        os.kill(relay.pid, signal.SIGSTOP)  # so that the heal is not over before the relay is
        await job.start("c", **SEVERAL_CHUNKS)
        await asks(c, url)
        os.kill(relay.pid, signal.SIGKILL)
        await job.advance(a, b, c)
        assert len(healed(job, c)) > heals
        assert [group.ranks[0].exit_code for group in (a, b, c)] == [None] * 3
        assert job.assert_identical() >= 20
