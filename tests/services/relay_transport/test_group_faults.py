"""Sources and joiners that are killed, or freeze, in the middle of a heal through a relay."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import psutil
import pytest

from keepstep.checkpointing import TransferError
from keepstep.transfer.relayed import relay_fetch
from tests.services.relay_transport.scene import (
    CHUNK_MIB,
    Groups,
    arrived,
    received_mib,
    relay,
    sent_mib,
    source,
    until,
)
from tests.support.checkpoints.checkpoint_ends import MIB, eventually, peer

pytestmark = pytest.mark.usefixtures("impatient")
SOON = 10.0
"""Seconds; what ends with the joiner's deadline would take 60."""


# ---- sources


async def test_a_source_killed_in_the_middle_of_its_upload_costs_nothing_while_another_has_the_state():
    async with relay() as url:
        with Groups([url], others=1, mib=64, uplink=32 * MIB) as groups:
            with source("s1", "s0,s1", "j0", url, 64, 8 * MIB) as (dying, _):
                groups.stage(0)
                healing = asyncio.create_task(groups.heal())
                await arrived(url, 2 * CHUNK_MIB)
                dying.kill()
                await healing
            await groups.uploaded(url)
            assert groups.joiners[0].via == "relay"
            assert await received_mib(url) >= 64, "what the other did not bring too"


async def test_the_source_of_the_manifest_killed_in_the_middle_costs_nothing_while_another_uploads():
    async with relay() as url:
        with (
            Groups([url], others=1, mib=64, uplink=32 * MIB) as groups,
            source("s1", "s0,s1", "j0", url, 64, 8 * MIB) as (dying, address),
        ):
            groups.stage(0)

            def kill():
                dying.kill()
                groups.joiners[0].source_lost("s1: its connection broke")

            await groups.heal(url=address, progress=until(CHUNK_MIB, lambda: threading.Thread(target=kill).start()))
            assert await asyncio.to_thread(dying.wait, SOON) == -signal.SIGKILL
            assert groups.joiners[0].via == "relay"
            assert await sent_mib(url) > CHUNK_MIB


@pytest.mark.parametrize("told", [True, False])
async def test_a_source_killed_with_nobody_else_is_an_error_soon(told, monkeypatch):
    monkeypatch.setattr(relay_fetch, "LOST_SECONDS", 1.5)
    async with relay() as url:
        with (
            Groups([url], sources=0, others=1, mib=64) as groups,
            source("s0", "s0", "j0", url, 64, 16 * MIB) as (dying, address),
        ):

            def kill():
                dying.kill()
                if told:
                    groups.joiners[0].source_lost("s0: its connection broke")

            act = until(CHUNK_MIB, lambda: threading.Thread(target=kill).start())
            began = time.monotonic()
            with pytest.raises(
                TransferError, match=r"the source is lost .* no relay or joiner has the missing chunks"
            ) as caught:
                await groups.receiving(url=address, progress=act)
            assert caught.value.torn
            assert not isinstance(caught.value, TimeoutError)
            assert time.monotonic() - began < SOON


async def test_a_source_lost_before_its_manifest_came_is_an_error_at_once():
    async with relay() as url:
        with Groups([url]) as groups:  # nothing is staged: its server lets the joiner wait
            receiving = asyncio.create_task(groups.receiving())
            await asyncio.to_thread(eventually, lambda: groups.sources[0].direct.server._connections)
            groups.joiners[0].source_lost("s0: silent")
            began = time.monotonic()
            with pytest.raises(TransferError, match="its source is lost: s0: silent") as caught:
                await receiving
            assert not caught.value.torn
            assert time.monotonic() - began < SOON


async def test_a_source_that_freezes_after_its_upload_is_not_needed():
    async with relay() as url:
        with (
            Groups([url], sources=0, others=1, mib=64) as groups,
            source("s0", "s0", "j0", url, 64) as (frozen, address),
        ):
            await groups.uploaded(url)
            await groups.heal(url=address, progress=until(CHUNK_MIB, lambda: os.kill(frozen.pid, signal.SIGSTOP)))
            async with asyncio.timeout(30):
                while psutil.Process(frozen.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.01)
            assert await sent_mib(url) >= 64


# ---- joiners


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_the_others_heal_when_a_joiner_ends_in_the_middle(number):
    async with relay() as url:
        with Groups([url], joiners=3, mib=128, uplink=64 * MIB) as groups:
            with peer("relay-joiner", "j2", "s0", "j0,j1,j2", url, groups.sources[0].metadata()) as dying:
                groups.stage()
                said = await asyncio.to_thread(dying.stdout.readline)
                assert said == "begun\n"
                healing = asyncio.create_task(groups.heal(0, 1))
                os.kill(dying.pid, number)
                await healing
            assert await sent_mib(url) < 3 * 128
