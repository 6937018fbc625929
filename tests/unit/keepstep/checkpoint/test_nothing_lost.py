"""Losses that torch.distributed.checkpoint does not report, and deaths of ranks and of the relay during a save."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointAborted, CheckpointDamaged, CheckpointError, CheckpointNotFound, RelayWriter
from keepstep.checkpoint.places.at_relay import RelayTarget
from keepstep.checkpoint.planning import RankLayout
from keepstep.checkpoint.saving import open_target, pack_of, save_facts
from keepstep.checkpoint.stored import StoredCheckpoint
from keepstep.relay_client.uploading import RelayUpload
from keepstep.state.flattening import flatten
from keepstep.state.local_parts import local_parts
from keepstep_relay.core.events import Limits
from tests.support.checkpoints.sharded_worlds import MemoryReader, fake_rank, parts_of
from tests.support.services.relay_driver import flip, relay

TIMEOUT = timedelta(seconds=60)
STATE = {"w": torch.arange(3000.0), "v": torch.ones(5)}
STAGES = ("begin", "exchange", "store", "commit")


def saves(place, ranks=(0, 1), timeout=TIMEOUT):
    """Save ``STATE`` on threads, and return the error of each rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        running = [
            pool.submit(checkpoint.save, STATE, place, rank=rank, world_size=2, timeout=timeout) for rank in ranks
        ]
        return [one.exception() for one in running]


def check_loads(place):
    state = {key: torch.zeros_like(value) for key, value in STATE.items()}
    checkpoint.load(state, place, timeout=TIMEOUT)
    assert all(state[key].equal(value) for key, value in STATE.items())


def dies_before(stage, place):
    """Do the part of rank 1 up to ``stage``, and then nothing more, as a process that is killed."""
    parts = local_parts(flatten(STATE))
    target = open_target(place, save_facts(1, 2, 0, "durable"), timeout=TIMEOUT)
    work = {
        "begin": target.begin,
        "exchange": lambda: target.exchange(RankLayout.of(parts, {}).pack()),
        "store": lambda: target.store(pack_of({"v": parts["v"]})),
        "commit": lambda: None,
    }
    for name in STAGES[: STAGES.index(stage)]:
        work[name]()
    target.close()


async def test_a_rank_that_dies_at_any_stage_aborts_the_save_and_nothing_else(tmp_path):
    async with relay(data_dir=tmp_path, limits=Limits(upload_seconds=2.0)) as one:
        place = f"{one.address}/v1/jobs/j/checkpoints"
        assert await asyncio.to_thread(saves, f"{place}/before") == [None, None]

        def one_of_two_dies(stage):
            with ThreadPoolExecutor(1) as pool:
                dying = pool.submit(dies_before, stage, f"{place}/{stage}")
                (error,) = saves(f"{place}/{stage}", ranks=(0,))
                dying.result()
            return error

        stages = STAGES[:-1]
        errors = await asyncio.gather(*(asyncio.to_thread(one_of_two_dies, stage) for stage in stages))
        for stage, error in zip(stages, errors, strict=True):
            assert isinstance(error, CheckpointAborted), (stage, error)
            assert "no sign of life of rank" in str(error)
            with pytest.raises(CheckpointNotFound, match="was deleted"):
                await asyncio.to_thread(check_loads, f"{place}/{stage}")
        await asyncio.to_thread(check_loads, f"{place}/before")
        assert (await asyncio.to_thread(one_of_two_dies, "commit")) is None, "its part was complete"


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_rank_that_dies_leaves_no_checkpoint_in_a_directory(tmp_path, stage):
    assert saves(tmp_path / "before") == [None, None]
    place = tmp_path / "c"
    with ThreadPoolExecutor(1) as pool:
        dying = pool.submit(dies_before, stage, place)
        (error,) = saves(place, ranks=(0,), timeout=timedelta(seconds=1))
        dying.result()
    assert isinstance(error, CheckpointAborted)
    assert "missing in" in str(error)
    with pytest.raises(CheckpointNotFound, match=r"has no committed checkpoint: missing checkpoint\.json"):
        check_loads(place)
    check_loads(tmp_path / "before")
    assert saves(place) == [None, None], "files of the failed attempt are in the way"
    check_loads(place)


@pytest.mark.parametrize("stage", ["exchange", "store", "put", "commit"])
@pytest.mark.parametrize("kind", ["durable", "live"])
async def test_a_save_goes_on_when_the_relay_restarts_at_any_stage(tmp_path, monkeypatch, stage, kind):
    reached, restarted = threading.Event(), threading.Event()
    owner = RelayUpload if stage == "put" else RelayTarget
    usual = getattr(owner, stage)

    def waits(self, *arguments):
        reached.set()
        assert restarted.wait(60)
        return usual(self, *arguments)

    folder = {"data_dir": tmp_path} if kind == "durable" else {}
    async with relay(**folder) as one:
        address = one.address
        place = f"{address}/v1/jobs/j/checkpoints/c"
        monkeypatch.setattr(owner, stage, waits)
        monkeypatch.setattr("keepstep_relay.api.exchange.SIGN_OF_LIFE_SECONDS", 0.1)
        with ThreadPoolExecutor(2) as pool:
            running = [
                pool.submit(checkpoint.save, STATE, place, rank=rank, world_size=2, kind=kind, timeout=TIMEOUT)
                for rank in range(2)
            ]
            assert await asyncio.to_thread(reached.wait, 60)
            await one.stop()
            async with relay(bind=address.removeprefix("http://"), **folder):
                restarted.set()
                for saving in running:
                    await asyncio.wrap_future(saving)
                await asyncio.to_thread(check_loads, place)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_full_disk_is_an_error_of_the_save(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"No space left on device; .* free space there"):
            checkpoint.save(STATE, tmp_path / "c")
        with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="No space left"):
            torch.distributed.checkpoint.save(STATE, storage_writer=RelayWriter(tmp_path / "c"))
    assert not list(tmp_path.rglob("*"))


def test_a_flipped_byte_is_named_with_its_file_and_key(tmp_path):
    checkpoint.save({"layer.weight": torch.arange(3000.0)}, tmp_path / "c")
    flip(tmp_path / "c" / "pack-0")
    with pytest.raises(CheckpointDamaged, match=r"layer\.weight was not loaded: chunk 0 of .*/c/pack-0 is damaged"):
        checkpoint.load({"layer.weight": torch.zeros(3000)}, tmp_path / "c")


@pytest.mark.parametrize(
    ("file", "message"), [("manifest-0", "manifest-0 is damaged"), ("pack-0", "pack-0 has 10 bytes, expected")]
)
def test_a_truncated_file_is_named(tmp_path, file, message):
    checkpoint.save(STATE, tmp_path / "c")
    (tmp_path / "c" / file).write_bytes(b"0123456789")
    with pytest.raises(CheckpointDamaged, match=message):
        check_loads(tmp_path / "c")


async def test_a_chunk_that_the_relay_damaged_on_disk_is_named(tmp_path):
    async with relay(data_dir=tmp_path) as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        assert await asyncio.to_thread(saves, place) == [None, None]
    for file in tmp_path.rglob("chunks/**/*"):
        if file.is_file():
            flip(file)
    async with relay(data_dir=tmp_path) as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        with pytest.raises(CheckpointDamaged, match="w was not loaded: chunk 0 of rank"):
            await asyncio.to_thread(check_loads, place)


def test_a_region_that_no_shard_covers_is_an_error():
    with fake_rank(0, 2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        half = torch.distributed.tensor.DTensor.from_local(
            torch.ones(4), mesh, [torch.distributed.tensor.Shard(0)], run_check=False
        )
        alone = pack_of(parts_of({"w": half}))
    with pytest.raises(CheckpointError, match=r"w is incomplete .*: its shards have 4 of 8 elements"):
        StoredCheckpoint(MemoryReader([alone]))
