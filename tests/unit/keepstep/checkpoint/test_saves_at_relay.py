"""Saves at a relay that restarts, is too old, or does not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from datetime import timedelta

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointAborted, CheckpointError
from keepstep.checkpoint.places.at_relay import RelayTarget
from keepstep.checkpoint.saving import open_target, save_facts
from keepstep.connection.http_connection import BrokenConnection, Connection
from keepstep.state.errors import TransferTimeout
from keepstep_relay.core.events import ChunkLost, Limits, State, Tier
from tests.support.services.relay_driver import client, relay, state

TIMEOUT = timedelta(seconds=30)


async def test_a_failure_after_the_deadline_reaches_the_relay_at_once():
    async with relay() as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"

        def fails_late():
            facts = save_facts(0, 2, 0, "live")
            target = open_target(place, facts, timeout=timedelta(seconds=5))
            target.begin()  # leaves an open connection
            target._link.deadline._end = 0.0  # has passed
            target.fail("no time left")
            target.close()
            with pytest.raises(CheckpointError, match="rank 0 failed: no time left"):
                checkpoint.load({"a": 1}, place)

        await asyncio.to_thread(fails_late)


def two_ranks(place):
    targets = [open_target(place, save_facts(rank, 2, 0, "live"), timeout=TIMEOUT) for rank in range(2)]
    for target in targets:
        target.begin()
    return targets


async def test_a_rank_that_is_told_of_an_abort_does_not_abort_the_next_attempt():
    async with relay() as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"

        def attempts():
            told, failing = two_ranks(place)
            failing.fail("no memory")
            with pytest.raises(CheckpointAborted, match="rank 1 failed: no memory") as error:
                told.exchange(b"layout")
            again = two_ranks(place)
            told.fail(str(error.value))
            for target in (told, failing, *again):
                target.close()

        await asyncio.to_thread(attempts)
        assert [upload.state for upload in one.core.checkpoints.values()] == [State.BEGUN]


async def test_a_failure_reaches_the_other_ranks_also_after_the_relay_has_restarted():
    async with relay() as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        goes_on, failing = await asyncio.to_thread(two_ranks, place)
        await one.stop()
        async with relay(bind=one.address.removeprefix("http://")):

            def fails_first():
                failing.fail("no memory")
                with pytest.raises(CheckpointAborted, match="rank 1 failed: no memory"):
                    goes_on.exchange(b"layout")
                for target in (failing, goes_on, *two_ranks(place)):  # which begin again
                    target.close()

            await asyncio.to_thread(fails_first)


async def test_a_relay_without_the_exchange_is_named_soon(monkeypatch):
    monkeypatch.setattr("keepstep_relay.api.exchange.routes", lambda _: [])  # as in a relay of yesterday
    async with relay() as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        with pytest.raises(CheckpointError, match=r"older than this build .*: update the relay"):
            await asyncio.to_thread(checkpoint.save, {"a": 1}, place, rank=0, world_size=2, kind="live")


async def test_an_exchange_goes_on_when_the_relay_forgets_the_layouts(monkeypatch):
    monkeypatch.setattr("keepstep_relay.api.exchange.SIGN_OF_LIFE_SECONDS", 0.1)
    async with relay() as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        usual, both, asked = RelayTarget._get_layout, threading.Barrier(2), set()

        async def forget():
            for upload in one.core.checkpoints.values():
                upload.layouts.clear()
            for key in list(one.checkpoints.records):
                one.checkpoints._drop_layouts(key)

        def get(self, digest):
            if self not in asked:
                asked.add(self)
                if both.wait(30) == 0:
                    asyncio.run_coroutine_threadsafe(forget(), loop).result(30)
                both.wait(30)
            return usual(self, digest)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(RelayTarget, "_get_layout", get)
        saving = [
            asyncio.to_thread(
                checkpoint.save, {f"w{rank}": 1}, place, rank=rank, world_size=2, kind="live", timeout=TIMEOUT
            )
            for rank in range(2)
        ]
        await asyncio.gather(*saving)


async def begin_again(one):
    """Another rank has begun the upload again."""
    (key,) = one.core.checkpoints
    facts = one.core.checkpoints[key].facts
    await one.checkpoints.remove(key, "lost")
    await one.checkpoints.begin(key, facts)


async def lose_chunks(one):
    """The manifest is on disk, and no chunk is."""
    for digest in list(one.core.inventory.memory):
        one.chunks.memory.drop(digest)
        one.chunks.step(ChunkLost(digest, Tier.MEMORY))


@pytest.mark.parametrize(
    ("lose", "before"), [(begin_again, "/v1/chunks/"), (begin_again, "/result"), (lose_chunks, "/result")]
)
async def test_a_rank_sends_again_what_the_relay_lost_in_a_restart(monkeypatch, lose, before):
    async with relay() as one:
        loop = asyncio.get_running_loop()
        usual, lost = Connection.ask, threading.Event()

        def ask(self, method, target, *args, **how):
            if method != "GET" and before in target and not lost.is_set():
                lost.set()
                asyncio.run_coroutine_threadsafe(lose(one), loop).result(30)
            return usual(self, method, target, *args, **how)

        monkeypatch.setattr(Connection, "ask", ask)
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        state = {"w": torch.full((3000,), 7.0)}
        await asyncio.to_thread(checkpoint.save, state, place, rank=0, world_size=1, kind="live", timeout=TIMEOUT)
        into = {"w": torch.zeros(3000)}
        await asyncio.to_thread(checkpoint.load, into, place)
        assert into["w"].equal(state["w"])
        assert lost.is_set()


@pytest.mark.parametrize("lost", ["the answer to its result", "its question for the state"])
async def test_a_rank_that_hears_late_of_a_commit_succeeds_although_the_checkpoint_was_dropped_since(monkeypatch, lost):
    async with relay(limits=Limits(keep_live=1)) as one, client(one.address, job="j") as other:
        loop = asyncio.get_running_loop()
        usual, dropped = Connection.ask, threading.Event()

        def ask(self, method, target, *args, **how):
            if "/state" in target and not dropped.is_set():
                drop()
            answer = usual(self, method, target, *args, **how)
            if lost == "the answer to its result" and "/result" in target and not dropped.is_set():
                drop()
                raise BrokenConnection("lost")
            return answer

        def drop():
            dropped.set()
            asyncio.run_coroutine_threadsafe(other.store(state(1), "newer", step=2), loop).result(30)
            assert [key.id for key in one.core.checkpoints] == ["newer"]

        monkeypatch.setattr(Connection, "ask", ask)
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        await asyncio.to_thread(checkpoint.save, {"a": 1}, place, step=1, kind="live", timeout=TIMEOUT)
        assert dropped.is_set()


async def test_a_checkpoint_that_is_too_old_to_be_kept_is_not_reported_as_saved():
    async with relay(limits=Limits(keep_live=1)) as one, client(one.address, job="j") as other:
        await other.store(state(1), "newer", step=2)
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        with pytest.raises(CheckpointError, match=r"was deleted: only the newest live checkpoints"):
            await asyncio.to_thread(checkpoint.save, {"a": 1}, place, step=1, kind="live", timeout=TIMEOUT)


def test_a_time_limit_names_the_failure_before_it():
    with socket.socket() as held:  # the port accepts no connection, and no other process gets it
        held.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{held.getsockname()[1]}/v1/jobs/j/checkpoints/c"
        with pytest.raises(TransferTimeout, match="refused"):
            checkpoint.save({"a": 1}, place, timeout=timedelta(seconds=1))
