"""Durable checkpoints while groups, relays and disks fail. Groups and relays are processes that real signals kill."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.services.manager.durable.test_durable_checkpoints import listed
from tests.services.manager.groups import place_to_meet
from tests.support.services.command import environment
from tests.support.services.relay_driver import DEADLINE, metric, relay_process

PEER = Path(__file__).parents[3] / "support" / "checkpoints" / "durable_peer.py"
SLOW = {"KEEPSTEP_UPLINK_BYTES_PER_SECOND": "1000"}
"""The first chunk is uploaded at once, the next one after hours."""
MODERATE = {"KEEPSTEP_UPLINK_BYTES_PER_SECOND": str(4 << 20)}
"""A chunk takes two seconds."""


@pytest.fixture(autouse=True)
def peers_start_at_once(fork_server_of_scripts: None) -> None:
    """Start groups and relays without a wait for imports."""


class Peer:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def __call__(self, line: str) -> dict[str, Any]:
        """Send a line, and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(DEADLINE):
            answer: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return answer

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def peer(lighthouse: str, relays: str, name: str, **how: str) -> AsyncIterator[Peer]:
    arguments = (lighthouse, relays, name, "1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PEER), *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(**how)
    )
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def step(*peers: Peer) -> list[dict[str, Any]]:
    """One step of all of them."""
    await asyncio.gather(*(one("begin") for one in peers))
    return await asyncio.gather(*(one("commit") for one in peers))


async def until_received(url: str, size: float) -> None:
    async with asyncio.timeout(DEADLINE):
        while await metric(url, "received_bytes_total") < size:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)


async def until_only_the_first_is_listed(url: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while await listed(url) != {1: "committed"}:  # noqa: ASYNC110 - nothing tells that the upload is dropped
            await asyncio.sleep(0.05)


async def test_a_killed_group_is_replaced_in_an_upload_and_without_any_group_the_checkpoint_before_it_stays(
    lighthouse: str, tmp_path: Path
) -> None:
    flags = ("--data-dir", str(tmp_path), "--upload-timeout", "1")
    async with relay_process(*flags) as (_, url):
        both = {"NUM_REPLICA_GROUPS": "2"}
        async with peer(lighthouse, url, "a", **both) as a, peer(lighthouse, url, "k", **both, **SLOW) as killed:
            await step(a, killed)
            await asyncio.gather(a("begin"), killed("begin"))  # stages step 1
            await killed.kill()
            assert (await a("finish"))["saved"] == 1
            await a("commit")
        async with peer(lighthouse, url, "b", **SLOW) as b:
            assert (await b("begin"))["step"] == 1, "resumed"
            await b("commit")
            received = await metric(url, "received_bytes_total")
            await b("begin")  # stages step 2
            await until_received(url, received + 1)
            await b.kill()
        await until_only_the_first_is_listed(url)
        async with peer(lighthouse, url, "c") as c:
            assert await c("begin") == {"step": 1, "weight": 1.0, "saved": 1, "error": ""}


async def test_an_upload_goes_on_when_its_relay_was_killed_and_came_back(lighthouse: str, tmp_path: Path) -> None:
    disk = ("--data-dir", str(tmp_path))
    async with relay_process(*disk) as (relay, url), peer(lighthouse, url, "a", **MODERATE) as a:
        await step(a)
        await a("begin")
        await until_received(url, 1)
        relay.kill()
        await relay.wait()
        async with relay_process(*disk, "--bind", url.removeprefix("http://")) as (_, again):
            assert again == url
            assert (await a("finish")) == {"step": 1, "weight": 1.0, "saved": 1, "error": ""}
            assert await listed(url) == {1: "committed"}


@pytest.mark.parametrize("small_disk", ["30m"], indirect=True)
async def test_a_full_disk_is_an_error_of_that_checkpoint_only(lighthouse: str, small_disk: Path) -> None:
    async with relay_process("--data-dir", str(small_disk)) as (_, url), peer(lighthouse, url, "a") as a:
        await step(a)
        await a("begin")
        assert (await a("finish"))["saved"] == 1
        await a("commit")
        await step(a)
        full = await a("finish")
        assert (full["saved"], full["step"]) == (1, 3)
        assert "disk" in full["error"]
        await until_only_the_first_is_listed(url)


@asynccontextmanager
async def two_ranks(lighthouse: str, relays: str) -> AsyncIterator[list[Peer]]:
    """The ranks of a group whose states differ, as with FSDP."""
    place = place_to_meet()
    where = {"MASTER_ADDR": place["store_addr"], "MASTER_PORT": str(place["store_port"]), "WORLD_SIZE": "2"}
    async with (
        peer(lighthouse, relays, "a", RANK="0", **where) as first,
        peer(lighthouse, relays, "a", RANK="1", **where) as second,
    ):
        yield [first, second]


async def both(ranks: list[Peer], line: str) -> list[dict[str, Any]]:
    return await asyncio.gather(*(one(line) for one in ranks))


async def test_a_job_of_one_group_that_loses_all_ranks_and_a_relay_is_back_from_the_memory_of_the_other_relay(
    lighthouse: str,
) -> None:
    flags = ("--memory-checkpoints", "2", "--memory", "256MiB")
    async with relay_process(*flags) as (one, first), relay_process(*flags) as (_, second):
        relays = f"{first},{second}"
        async with two_ranks(lighthouse, relays) as ranks:
            for _ in range(4):
                await step(*ranks)
            await both(ranks, "begin")
            assert [last["saved"] for last in await both(ranks, "finish")] == [4, 4]
            for url in (first, second):
                assert {3, 4} <= set(await listed(url)), "a read one stays for a minute"
            one.kill()
            for rank in ranks:
                await rank.kill()
        async with two_ranks(lighthouse, relays) as ranks:
            assert await both(ranks, "begin") == [
                {"step": 4, "weight": 4.0 + 100 * rank, "saved": 4, "error": ""} for rank in range(2)
            ]
            assert [last["step"] for last in await both(ranks, "commit")] == [5, 5]
            await both(ranks, "begin")
            last = await both(ranks, "finish")
            assert [rank["saved"] for rank in last] == [5, 5], "one copy is better than none"
            assert [rank["weight"] for rank in last] == [5.0, 105.0], "as if nothing had happened"
