"""The upload of one rank to a real relay that loses it, or where another process ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import Connection, Endpoint, Refusal
from keepstep.relay_client.relay_link import RelayLink
from keepstep.relay_client.relay_requests import RelayCheckpoint
from keepstep.relay_client.uploading import MAX_LOSSES, Packed, RelayUpload, StatesDiffer
from keepstep.state.errors import TransferError
from keepstep.state.state_bytes import save_state
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.events import Key, State
from tests.support.services.relay_driver import JOB, client, relay, state
from tests.support.services.relay_driver import State as Stored

FACTS = {"step": 1, "kind": "live", "ranks": 1}


def packed(stored: Stored) -> Packed:
    return Packed.of(stored.manifest, memoryview(stored.pack))


@contextmanager
def upload(address: str, producer: str = "a", streams: int = 1) -> Iterator[RelayUpload]:
    link = RelayLink([Endpoint.of(address, dict)], Deadline(60, "no answer"))
    try:
        yield RelayUpload(link, RelayCheckpoint(JOB, "c1", 0, producer), FACTS, streams=streams)
    finally:
        link.close()


async def in_thread(address: str, work: Callable[[RelayUpload], object], **how: int) -> None:
    def run() -> None:
        with upload(address, **how) as one:
            work(one)

    await asyncio.to_thread(run)


@pytest.mark.parametrize("streams", [1, 4])
async def test_a_state_is_uploaded_and_equal_chunks_once(streams: int) -> None:
    manifest, pack = save_state({"zeros": torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)})
    async with relay() as at:

        def check(one: RelayUpload) -> None:
            assert one.send(Packed.of(manifest, pack))["state"] == "committed"
            assert one.sent_bytes == CHUNK_BYTES

        await in_thread(at.address, check, streams=streams)
        async with client(at.address) as reader:
            assert await reader.pack("c1") == pack


async def test_an_upload_that_another_rank_aborts_while_chunks_are_sent_is_not_begun_again() -> None:
    async with relay() as at:
        loop = asyncio.get_running_loop()

        def check(one: RelayUpload) -> None:
            missing = one.announce(packed(state(1)))
            asyncio.run_coroutine_threadsafe(at.checkpoints.abort(Key(JOB, "c1"), "no memory"), loop).result(30)
            with pytest.raises(Refusal, match=r"was deleted: no memory") as caught:
                one.until_kept(lambda: one.put(packed(state(1)), missing))
            assert caught.value.status == 410

        await in_thread(at.address, check)
        assert not at.core.checkpoints


async def test_a_relay_that_has_another_state_gets_no_chunk() -> None:
    async with relay() as at:
        await in_thread(at.address, lambda one: one.announce(packed(state(1))))

        def check() -> None:
            with upload(at.address, "b") as one:
                with pytest.raises(StatesDiffer, match="rank 0 of checkpoint c1 has another state"):
                    one.send(packed(state(2)))
                assert one.sent_bytes == 0

        await asyncio.to_thread(check)
        assert [one.state for one in at.core.checkpoints.values()] == [State.PLANNED]


async def test_an_upload_that_the_relay_loses_again_and_again_fails_and_says_so() -> None:
    async with relay() as at:
        begun: list[int] = []

        def lose(connection: Connection) -> None:
            begun.append(1)
            connection.ask("GET", "/v1/unknown")

        def check(one: RelayUpload) -> None:
            with pytest.raises(TransferError, match=r"lost the upload 11 times, .*not found.*: update the relay"):
                one.until_kept(lambda: one.ask(lose))
            assert len(begun) == 1 + MAX_LOSSES

        await in_thread(at.address, check)
