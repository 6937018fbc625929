"""States come back bit for bit from a directory and from a relay, saved by several ranks without a process group."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointAborted, CheckpointError, MissingKeys, StoredCheckpoint
from keepstep.checkpointing import UnsupportedValue
from tests.support.services.relay_driver import relay

TIMEOUT = timedelta(seconds=30)


def together(world, work):
    """Run ``work(rank)`` on a thread for each rank, and return the results or errors."""
    with ThreadPoolExecutor(world) as pool:
        running = [pool.submit(work, rank) for rank in range(world)]
        return [one.exception() or one.result() for one in running]


def rank_state(rank):
    """Replicated values, and some that only one rank has."""
    random = torch.Generator().manual_seed(0)  # of its own: ranks are threads
    return {
        "model": {
            "weight": torch.randn(300, 40, generator=random),
            "bias": torch.randn(7, generator=random),
            "tokens": torch.tensor(5),
        },
        "lists": [torch.arange(3), {"x": 1.5}, (1, "a")],
        f"rng.{rank}": torch.arange(4 + rank),
        "epoch": 3,
        "empty": {},
        "array": np.arange(5, dtype=np.int16),
        7: torch.ones(2, dtype=torch.bfloat16),
    }


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if type(value) is list else 0


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and (one == other).all()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if type(one) is list:
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_directory_gives_back_what_the_ranks_saved(tmp_path, world):
    place = tmp_path / "c1"
    save = lambda rank: checkpoint.save(  # noqa: E731
        rank_state(rank), place, rank=rank, world_size=world, step=9, timeout=TIMEOUT
    )
    assert together(world, save) == [None] * world
    for rank in range(world):
        state = blank(rank_state(rank)) | {"empty": {}}
        weight = state["model"]["weight"]
        checkpoint.load(state, place, timeout=TIMEOUT)
        assert same(state, rank_state(rank))
        assert state["model"]["weight"] is weight
    names = {file.name for file in place.iterdir()}
    assert names == {"checkpoint.json"} | {f"{kind}-{rank}" for kind in ("pack", "manifest") for rank in range(world)}
    sizes = [(place / f"pack-{rank}").stat().st_size for rank in range(world)]
    assert sum(sizes) < 50_000 + 1000 * world, "a replicated value was saved twice"
    assert json.loads((place / "checkpoint.json").read_text())["step"] == 9


async def test_a_relay_gives_back_what_the_ranks_saved(tmp_path):
    async with relay(data_dir=tmp_path) as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c1"
        save = lambda rank: checkpoint.save(  # noqa: E731
            rank_state(rank), place, rank=rank, world_size=3, timeout=TIMEOUT
        )
        assert await asyncio.to_thread(together, 3, save) == [None] * 3
        state = blank(rank_state(1)) | {"empty": {}}
        await asyncio.to_thread(checkpoint.load, state, place, timeout=TIMEOUT)
        assert same(state, rank_state(1))
        with pytest.raises(CheckpointError, match=r"already exists: .* use another id, or pass overwrite=True"):
            await asyncio.to_thread(checkpoint.save, {"a": 1}, place, rank=0, world_size=3, timeout=TIMEOUT)
        with pytest.raises(
            CheckpointError, match=r"invalid checkpoint_id 's3://b/x': Cannot detect the storage of s3://"
        ):
            checkpoint.save({"a": 1}, "s3://b/x")


def test_the_whole_state_is_restored_without_a_template(tmp_path):
    checkpoint.save(rank_state(0), tmp_path / "c")
    reader = checkpoint.open_reader(tmp_path / "c")
    assert same(StoredCheckpoint(reader).state_dict(), rank_state(0))
    reader.close()


def test_modules_and_optimizers_are_saved_and_loaded(tmp_path):
    def build():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return {"app": {"model": model, "optimizer": optimizer}, "step": 1}

    saved, loaded = build(), build() | {"step": 0}
    checkpoint.async_save(saved, tmp_path / "c").result(30)
    checkpoint.load(loaded, tmp_path / "c")
    assert loaded["step"] == 1
    for name in ("model", "optimizer"):
        assert same(saved["app"][name].state_dict(), loaded["app"][name].state_dict())

    fresh = torch.optim.AdamW(build()["app"]["model"].parameters())
    with pytest.raises(CheckpointError, match=r"app\.optimizer\.state is empty here, but the checkpoint has 12 values"):
        checkpoint.load({"app": {"optimizer": fresh.state_dict()}}, tmp_path / "c")


class Interrupted:
    """An object that raises an error instead of returning its state."""

    def __init__(self, error):
        self._error = error

    def state_dict(self):
        raise self._error

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ValueError("bad")], ids=repr)
def test_a_rank_that_cannot_copy_its_state_for_async_save_tells_the_others(tmp_path, error) -> None:
    more = {"world_size": 2, "timeout": timedelta(seconds=100)}
    other = checkpoint.async_save({"w": torch.ones(3)}, tmp_path / "c", rank=0, **more)
    with pytest.raises(type(error)):
        checkpoint.async_save({"m": Interrupted(error)}, tmp_path / "c", rank=1, **more)
    with pytest.raises(CheckpointAborted, match=rf"rank 1 failed: {type(error).__name__}"):
        other.result(80)


def test_the_state_may_change_after_async_save_returned(tmp_path):
    state = {"w": torch.ones(1000), "list": [1]}
    saving = [checkpoint.async_save(state, tmp_path / f"{n}") for n in range(3)]
    state["w"].zero_()
    state["list"].append(2)
    for number, one in enumerate(saving):
        one.result(30)
        loaded = {"w": torch.zeros(1000), "list": None}
        checkpoint.load(loaded, tmp_path / f"{number}")
        assert loaded["w"].sum() == 1000
        assert loaded["list"] == [1]


def test_a_load_names_missing_keys_and_what_is_there(tmp_path):
    checkpoint.save({"model": {"layer.weight": torch.ones(2)}}, tmp_path / "c")
    state = {"model": {"layer.weigth": torch.zeros(2)}}
    with pytest.raises(MissingKeys, match=r"does not have model.layer.weigth; similar keys: model.layer.weight \(1 k"):
        checkpoint.load(state, tmp_path / "c")
    checkpoint.load(state, tmp_path / "c", strict=False)
    with pytest.raises(CheckpointError, match=r"has shape \(3,\) here, but is a float32 tensor of shape \(2,\)"):
        checkpoint.load({"model": {"layer.weight": torch.zeros(3)}}, tmp_path / "c")


class Odd:
    """A value that a checkpoint cannot store."""


def save_odd(rank, place):
    state = {"a": {"b": Odd() if rank else 1}}
    checkpoint.save(state, place, rank=rank, world_size=2, timeout=TIMEOUT)


def check_odd(errors):
    assert isinstance(errors[0], CheckpointAborted)
    for error in errors:
        assert "['a.b'] is a tests.unit.keepstep.checkpoint.test_save_and_load.Odd" in str(error)
    assert isinstance(errors[1], UnsupportedValue)


async def test_a_value_that_cannot_be_stored_is_an_error_on_every_rank(tmp_path):
    async with relay(data_dir=tmp_path) as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c1"
        check_odd(await asyncio.to_thread(together, 2, lambda rank: save_odd(rank, place)))
        with pytest.raises(checkpoint.CheckpointNotFound):
            await asyncio.to_thread(checkpoint.load, {"a": {"b": 1}}, place, timeout=TIMEOUT)


async def test_a_rank_that_begins_after_another_failed_gets_the_reason_once(tmp_path):
    def save(rank, place):
        checkpoint.save({"a": 1}, place, rank=rank, world_size=2, timeout=TIMEOUT)

    def save_after_errors(place, has_begun):
        with pytest.raises(UnsupportedValue) as first:
            save_odd(1, place)
        with pytest.raises(CheckpointAborted) as second:
            save_odd(0, place)
        check_odd([second.value, first.value])
        with pytest.raises(UnsupportedValue):
            save_odd(1, place)
        with ThreadPoolExecutor(1) as pool:
            retry = pool.submit(save, 1, place)
            assert has_begun.wait(30)
            save(0, place)
            retry.result()

    async with relay(data_dir=tmp_path) as one:
        begun = threading.Event()
        saving = asyncio.create_task(
            asyncio.to_thread(save_after_errors, f"{one.address}/v1/jobs/j/checkpoints/c1", begun)
        )
        while not saving.done():
            if any(checkpoint.layouts for checkpoint in one.core.checkpoints.values()):
                begun.set()
            await asyncio.sleep(0.01)
        await saving


def test_a_value_that_cannot_be_stored_is_an_error_on_every_rank_of_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("keepstep.checkpoint.places.rank_files.STALE_SECONDS", 0.1)
    check_odd(together(2, lambda rank: save_odd(rank, tmp_path)))
    with pytest.raises(checkpoint.CheckpointNotFound):
        checkpoint.load({"a": {"b": 1}}, tmp_path)


@pytest.mark.parametrize("value", [torch.zeros(3), 5])
def test_replicas_that_differ_are_an_error_on_request(tmp_path, value):
    def save(rank):
        state = {"a": value + rank, "b": torch.ones(3)}
        checkpoint.save(state, tmp_path / "c", rank=rank, world_size=2, check_replicas=True, timeout=TIMEOUT)

    for error in together(2, save):
        assert "a differs between ranks 0 and 1" in str(error)


def test_a_file_that_cannot_grow_is_an_error_that_says_what_to_do(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"was not saved: File too large; earlier .* free space there"):
            checkpoint.save({"a": torch.ones(1 << 20)}, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("state", "place", "words"),
    [
        ({"w": torch.ones(1)}, None, "the checkpoint has no place"),
        ({"w": torch.empty(1, device="meta")}, "c", "w is a tensor of .* on meta"),
    ],
)
def test_errors_of_a_background_save_are_those_of_torch_too_before_it_begins(tmp_path, state, place, words):
    with pytest.raises(CheckpointException, match=words) as raised:
        checkpoint.async_save(state, place and tmp_path / place)
    assert isinstance(raised.value, CheckpointError | UnsupportedValue)
    assert list(raised.value.failures) == [0]
