"""A group that gives up a heal, goes on to another step, or ends is done at once and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest

from keepstep.checkpointing import TransferError
from tests.services.relay_transport.scene import (
    CHUNK_MIB,
    DEADLINE,
    Groups,
    arrived,
    relay,
    source,
    switched_off,
    until,
)
from tests.support.checkpoints.checkpoint_ends import MIB, eventually
from tests.support.network.unanswered import unanswered_name
from tests.support.services.relay_driver import relay_process

AT_ONCE = 6.0
"""Seconds, on a busy machine."""


@pytest.mark.parametrize("frozen", [False, True], ids=["relay works", "relay is frozen"])
@pytest.mark.parametrize("joiners", [1, 2])
@pytest.mark.parametrize("end", ["abort_receive", "shutdown"])
async def test_a_joiner_that_gives_up_ends_at_once(end, joiners, frozen):
    async with relay_process() as (process, url):
        with Groups([url], joiners=joiners, mib=96, uplink=8 * MIB) as groups:
            groups.stage()
            begun = [threading.Event() for _ in range(joiners)]
            receiving = [
                asyncio.create_task(groups.receiving(number, progress=until(0, event.set)))
                for number, event in enumerate(begun)
            ]
            for event in begun:
                assert await asyncio.to_thread(event.wait, DEADLINE)
            if frozen:
                os.kill(process.pid, signal.SIGSTOP)
            began = time.monotonic()
            for joiner in groups.joiners:
                joiner.abort_receive("no more") if end == "abort_receive" else joiner.shutdown()
            for one in receiving:
                with pytest.raises(TransferError, match=r"was aborted: (no more|the transport is shut down)") as caught:
                    await one
                assert caught.value.torn
            groups.sources[0].shutdown()
            assert time.monotonic() - began < AT_ONCE
            os.kill(process.pid, signal.SIGCONT)


async def seconds_to_end(groups: Groups, receiving: asyncio.Task[Any]) -> float:
    """Of a joiner whose transfer is aborted, and its source."""
    began = time.monotonic()
    groups.joiners[0].abort_receive("no more")
    with pytest.raises(TransferError, match=r"was aborted: no more"):
        await receiving
    groups.sources[0].shutdown()
    return time.monotonic() - began


async def test_a_joiner_that_still_connects_ends_at_once_too():
    with switched_off() as relay, Groups([relay], joiners=2) as groups:
        groups.stage()
        receiving = asyncio.create_task(groups.receiving())
        await asyncio.to_thread(eventually, lambda: any(one._open for one in groups.joiners[0].direct._transfers))
        assert await seconds_to_end(groups, receiving) < AT_ONCE


async def test_a_joiner_that_waits_for_the_name_of_a_relay_ends_at_once_too():
    with unanswered_name() as name, Groups([f"http://{name}:80"], joiners=2) as groups:
        groups.stage()
        receiving = asyncio.create_task(groups.receiving())

        def waits():
            connections = [one for to in groups.joiners[0].direct._transfers for one in tuple(to._open)]
            return any(name in one.address and one._lookup is not None for one in connections)

        await asyncio.to_thread(eventually, waits)
        assert await seconds_to_end(groups, receiving) < AT_ONCE


async def test_a_script_that_just_ends_does_not_wait_for_its_upload():
    async with relay_process() as (process, url):
        with source("s0", "s0", "j0", url, 64, 4 * MIB) as (ending, _):
            await arrived(url, CHUNK_MIB)
            os.kill(process.pid, signal.SIGSTOP)
            ending.stdin.write("end\n")
            ending.stdin.flush()
            assert await asyncio.to_thread(ending.wait, 5 * AT_ONCE) == 0
        os.kill(process.pid, signal.SIGCONT)


async def test_a_newer_step_ends_the_upload_of_the_one_before():
    async with relay() as url:
        with Groups([url], mib=32, uplink=16 * MIB) as groups:
            groups.stage(step=1)
            await arrived(url, CHUNK_MIB)
            (older,) = groups.sources[0]._uploads
            groups.stage(step=2)
            await groups.heal(step=2)
            await groups.uploaded(url, step=2)
            assert not older.is_running


async def test_a_heal_that_runs_out_of_time_says_so():
    async with relay() as url:
        with Groups([url], mib=64, uplink=4 * MIB) as groups:
            groups.stage()
            with pytest.raises(TimeoutError, match=r"step 1 from .* was not received within 0.3 s"):
                await groups.receiving(timeout=timedelta(seconds=0.3))


async def test_twenty_heals_leave_no_thread_descriptor_or_memory_behind():
    async with relay("--memory", "1GiB") as url:
        with Groups([url], sources=2, joiners=2, mib=16) as groups:
            process = psutil.Process()

            def held():
                gc.collect()
                threads = sum(not one.name.startswith("asyncio_") for one in threading.enumerate())
                return threads, process.num_fds(), process.memory_info().rss

            async def heal(step):
                groups.stage(step=step)
                await groups.heal(step=step)
                await groups.uploaded(url, step=step)
                await asyncio.to_thread(
                    eventually, lambda: not any(one.is_running for source in groups.sources for one in source._uploads)
                )

            for step in range(1, 6):
                await heal(step)
            threads, descriptors, memory = held()
            for step in range(6, 26):
                await heal(step)
            eventually(lambda: held()[0] <= threads)
            eventually(lambda: held()[1] <= descriptors)
            assert held()[2] - memory < 8 * 16 * MIB, "less than two of the four states that each heal has"
