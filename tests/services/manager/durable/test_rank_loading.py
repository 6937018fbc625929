"""Loads of one rank's part of a durable checkpoint while a relay restarts, and of damaged ones."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.managed import rank_loading
from keepstep.checkpoint.managed.rank_loading import load_rank
from keepstep.connection.http_connection import Connection, Endpoint
from keepstep.relay_client.relay_link import RelayLink
from keepstep.relay_client.relay_requests import ask_chunk
from keepstep.state.errors import StateDamaged
from keepstep.state.state_bytes import save_state
from tests.support.services.relay_driver import JOB, State, client, relay, store_durable


async def store(address: str, value: float) -> list[Endpoint]:
    manifest, pack = save_state({"w": torch.full((1000,), value)})
    async with client(address) as worker:
        await store_durable(worker, State(bytes(pack), manifest), "step-7", 7)
    return [Endpoint.of(address, dict)]


def load(relays: list[Endpoint]) -> list[float]:
    found: list[float] = load_rank(relays, JOB, "step-7", 0, into=None, seconds=60.0)["w"].unique().tolist()
    return found


async def test_a_load_goes_on_when_its_only_relay_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as running:
        at = await running.enter_async_context(relay(data_dir=tmp_path))
        relays, loop, bind = await store(at.address, 7.0), asyncio.get_running_loop(), at.address[len("http://") :]
        usual, states = RelayLink.pause, ["running"]

        async def start() -> None:
            await running.enter_async_context(relay(bind=bind, data_dir=tmp_path))

        def ask(connection: Connection, digest: bytes, length: int) -> None:
            if states == ["running"]:
                states.append("stopped")
                asyncio.run_coroutine_threadsafe(running.aclose(), loop).result(60)
            ask_chunk(connection, digest, length)

        def pause(self: RelayLink, seconds: float) -> None:
            if states == ["running", "stopped"]:
                states.append("running again")
                asyncio.run_coroutine_threadsafe(start(), loop).result(60)
            usual(self, seconds)

        monkeypatch.setattr(rank_loading, "ask_chunk", ask)
        monkeypatch.setattr(RelayLink, "pause", pause)
        assert await asyncio.to_thread(load, relays) == [7.0]
        assert states == ["running", "stopped", "running again"]


async def test_a_checkpoint_is_damaged_only_if_every_relay_answers_that_it_is(tmp_path: Path) -> None:
    async with relay(data_dir=tmp_path / "one") as one, relay(data_dir=tmp_path / "other") as other:
        relays = [*await store(one.address, 7.0), *await store(other.address, 7.0)]
        for at in (one, other):
            for key in list(at.core.checkpoints):
                await at.checkpoints.remove(key, "removed")
            if at is one:
                assert await asyncio.to_thread(load, relays) == [7.0]
        with pytest.raises(StateDamaged, match=r"every relay failed: .*was deleted: removed; .*was deleted: removed"):
            await asyncio.to_thread(load, relays)
