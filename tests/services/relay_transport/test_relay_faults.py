"""Relays that die, freeze, come back with nothing, have no room, or are nowhere: the heal goes on without them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from datetime import timedelta

import psutil
import pytest

from keepstep.checkpointing import RelayTransport
from keepstep.transfer.relayed import relay_fetch
from keepstep_mesh.testing import ChaosProxy
from tests.services.relay_transport.scene import (
    CHUNK_MIB,
    DEADLINE,
    Groups,
    arrived,
    mortal_relay,
    received_mib,
    relay,
    sent_by,
    sent_mib,
    switched_off,
    until,
)
from tests.support.checkpoints.checkpoint_ends import MIB, same
from tests.support.checkpoints.checkpoint_peer import exchange, state_of
from tests.support.network.unanswered import unanswered_name
from tests.support.services.relay_driver import relay_process

pytestmark = pytest.mark.usefixtures("impatient")

# ---- killed


async def test_a_relay_killed_before_the_upload_begins():
    async with mortal_relay() as (kill, url):
        with Groups([url], joiners=2) as groups:
            kill()
            groups.stage()
            await groups.heal()
            assert {one.via for one in groups.joiners} == {"direct"}


async def test_a_relay_killed_in_the_middle_of_the_upload(caplog):
    async with mortal_relay() as (kill, url):
        with Groups([url], sources=2, joiners=2, mib=96, uplink=24 * MIB) as groups, sent_by(groups) as source:
            groups.stage()
            healing = asyncio.create_task(groups.heal(url=source.url))
            await arrived(url, CHUNK_MIB)
            kill()
            await healing
            assert source.passed > CHUNK_MIB * MIB
    assert f"relay failed an upload relay={url}" in caplog.text


async def test_a_relay_killed_in_the_middle_of_the_download():
    async with mortal_relay() as (kill, url):
        with Groups([url], joiners=2, mib=128) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.uploaded(url)
            await groups.heal(progress=until(24, kill), url=source.url)
            assert "relay" in {one.via for one in groups.joiners}
            assert source.passed > CHUNK_MIB * MIB


async def test_a_relay_killed_when_all_chunks_are_there():
    async with relay_process() as (process, url):
        with Groups([url], joiners=2, mib=64) as groups:
            groups.stage()
            await groups.heal(progress=until(64, lambda: os.kill(process.pid, signal.SIGKILL)))
            async with asyncio.timeout(DEADLINE):
                assert await process.wait() == -signal.SIGKILL
            assert "relay" in {one.via for one in groups.joiners}


async def test_a_connection_to_the_relay_that_breaks_is_made_again(patient):
    async with relay() as url, ChaosProxy.before(url) as proxy:
        loop = asyncio.get_running_loop()
        with Groups([proxy.url], mib=128) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.uploaded(url)
            cut = until(24, lambda: loop.call_soon_threadsafe(proxy.cut))
            await groups.heal(progress=cut, url=source.url)
            assert source.passed < MIB


@pytest.mark.parametrize("disk", [True, False], ids=["with a disk", "without a disk"])
async def test_a_relay_started_again_during_the_upload_has_all_of_it_in_the_end(tmp_path, disk):
    flags = ["--data-dir", str(tmp_path)] if disk else []
    with Groups([], mib=96, uplink=24 * MIB) as groups:
        async with mortal_relay(*flags) as (kill, url):
            groups.relays = [url]
            groups.stage()
            while await received_mib(url) < 3 * CHUNK_MIB:  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.01)
            kill()
        async with relay(*flags, "--bind", url.removeprefix("http://")) as url:
            await groups.heal()
            await groups.uploaded(url)
            sent_again = await received_mib(url)
            assert sent_again < 96 - CHUNK_MIB if disk else sent_again == pytest.approx(96, abs=0.1)


async def test_a_relay_started_again_with_its_disk_serves_what_was_committed(tmp_path, patient):
    flags = ["--data-dir", str(tmp_path)]
    with Groups([]) as groups:
        async with mortal_relay(*flags) as (kill, url):
            groups.relays = [url]
            groups.stage()
            await groups.uploaded(url)
            kill()
        async with relay(*flags, "--bind", url.removeprefix("http://")) as url:
            with sent_by(groups) as source:
                await groups.heal(url=source.url)
                assert source.passed < MIB


async def test_a_relay_started_again_with_nothing_leaves_the_heal_to_the_source():
    with Groups([], joiners=2) as groups:
        async with mortal_relay() as (kill, url):
            groups.relays = [url]
            groups.stage()
            await groups.uploaded(url)
            kill()
        async with relay("--bind", url.removeprefix("http://")) as url:
            await groups.heal()
            assert await sent_mib(url) == 0


# ---- frozen, or nowhere


@pytest.mark.parametrize("when", ["before", "in the middle"])
async def test_a_frozen_relay_is_waited_for_only_so_long(when):
    async with relay_process() as (process, url):
        with Groups([url], joiners=2, mib=128) as groups:
            if when == "before":
                os.kill(process.pid, signal.SIGSTOP)
            groups.stage()
            if when == "before":
                await groups.heal()
                assert {one.via for one in groups.joiners} == {"direct"}
            else:
                await groups.uploaded(url)
                await groups.heal(progress=until(24, lambda: os.kill(process.pid, signal.SIGSTOP)))
                assert "relay" in {one.via for one in groups.joiners}
            assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "http://",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:1",
        "http://a..b:80",
        f"http://{'x' * 300}:80",
        "ftp://127.0.0.1:80",
        "https://127.0.0.1:1",
    ],
)
async def test_an_address_that_is_none_costs_nothing(address):
    with Groups([address]) as groups:
        groups.stage()
        await groups.heal()
        assert groups.joiners[0].via == "direct"


async def test_a_relay_whose_name_nobody_answers_for_is_waited_for_only_so_long(caplog):
    with unanswered_name() as name, Groups([f"http://{name}:80"], joiners=2) as groups:
        groups.stage()
        await groups.heal()
        assert {one.via for one in groups.joiners} == {"direct"}
        assert f"the name {name} was not found" in caplog.text


async def test_an_address_that_is_none_is_told_and_the_other_relay_used(caplog, patient):
    async with relay() as url:
        with Groups(["nonsense", url]) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            assert source.passed < MIB
        assert "relay ignored reason=invalid address 'nonsense'" in caplog.text


async def test_a_relay_that_takes_no_connection_is_given_up():
    """Its host answers nothing, as one that is switched off."""
    with switched_off() as relay, Groups([relay], joiners=2) as groups:
        groups.stage()
        await groups.heal()
        assert {one.via for one in groups.joiners} == {"direct"}


# ---- no room


@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
async def test_a_full_disk_does_not_stop_a_heal(small_disk, patient):
    async with relay("--data-dir", str(small_disk)) as url:
        with Groups([url], sources=2, mib=64) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            assert source.passed < MIB
            await groups.uploaded(url, state="uploading")


async def test_chunks_that_do_not_fit_into_the_relays_memory_come_from_the_source():
    async with relay("--memory", "64MiB") as url:
        with Groups([url], sources=2, joiners=2, mib=96) as groups, sent_by(groups) as source:
            groups.stage()
            await groups.heal(url=source.url)
            assert await sent_mib(url) > 0
            assert 0 < source.passed < 2 * 96 * MIB


# ---- several


async def test_of_two_relays_one_is_killed_and_the_rest_goes_on():
    async with mortal_relay() as (kill, one), relay() as other:
        with Groups([one, other], sources=2, joiners=2, mib=128) as groups:
            groups.stage()
            await groups.heal(progress=until(24, kill))
            assert await received_mib(other) > 0  # what it sent depends on the speed: sources serve what comes late


async def test_of_two_relays_one_is_gone_before_and_the_other_gets_all():
    async with mortal_relay() as (kill, one), relay() as other:
        kill()
        with Groups([one, other], mib=64) as groups:
            groups.stage()
            await groups.heal()
            await groups.uploaded(other)
            assert await received_mib(other) == pytest.approx(64, abs=0.1)


# ---- slow


async def test_the_source_can_be_asked_after_a_relay_that_was_slow_for_longer_than_its_timeout(monkeypatch):
    monkeypatch.setattr(relay_fetch, "FETCH_PATIENCE_SECONDS", 2.5)

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (CHUNK_MIB * MIB))
            while not writer.is_closing():
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.1)
        writer.close()

    second = timedelta(seconds=1)
    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as slow:
        relays = [f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"]
        source = RelayTransport(second, list, hostname="127.0.0.1")
        joiner = RelayTransport(second, lambda: relays, hostname="127.0.0.1")
        try:
            source.send_checkpoint([1], 1, state_of(1, 2 * CHUNK_MIB), second)
            joiner.prepare(exchange("j0", ["s0"], ["j0"], 1))
            got = await asyncio.to_thread(
                joiner.recv_checkpoint, 0, source.metadata(), 1, second, limit=timedelta(seconds=DEADLINE)
            )
            assert same(got, state_of(1, 2 * CHUNK_MIB))
            assert joiner.via == "direct"
        finally:
            joiner.shutdown()
            source.shutdown()
