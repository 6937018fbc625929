"""Saves to a directory that fail, come too late, or meet another save there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointError
from keepstep.checkpoint.parts.flattening import flatten
from keepstep.checkpoint.parts.local_parts import local_parts
from keepstep.checkpoint.places.directory import DirectoryTarget
from keepstep.checkpoint.saving import open_target, pack_of, save_facts
from keepstep.checkpointing import UnsupportedValue
from keepstep.checkpointing.direct.connection import Deadline
from keepstep.checkpointing.errors import TransferTimeout

TIMEOUT = timedelta(seconds=30)


def save_of(place, value):
    """Return a save that has begun, and its pack."""
    target = open_target(place, save_facts(0, 1, 0, "durable"), timeout=TIMEOUT)
    target.begin()
    return target, pack_of(local_parts(flatten({"w": torch.full((3000,), value)})))


def loaded(place):
    state = {"w": torch.zeros(3000)}
    checkpoint.load(state, place, timeout=TIMEOUT)
    return state["w"].unique().tolist()


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_save_that_is_late_leaves_the_committed_checkpoint_as_it_is(tmp_path):
    early, pack = save_of(tmp_path, 1.0)
    late, other = save_of(tmp_path, 2.0)
    early.store(pack)
    early.commit()
    with pytest.raises(CheckpointError, match="has a committed checkpoint, which is never overwritten"):
        late.store(other)
    late.fail("too late")
    assert loaded(tmp_path) == [1.0]
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.json", "manifest-0", "pack-0"}


def test_a_save_whose_files_another_save_replaced_is_not_committed(tmp_path):
    first, pack = save_of(tmp_path, 1.0)
    second, other = save_of(tmp_path, 2.0)
    first.store(pack)
    second.store(other)
    with pytest.raises(CheckpointError, match="has replaced manifest-0: save to a directory of its own"):
        first.commit()
    second.commit()
    assert loaded(tmp_path) == [2.0]


def test_a_reader_opens_only_the_packs_that_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr("keepstep.checkpoint.places.directory.MAX_MAPPED", 2)
    with ThreadPoolExecutor(4) as pool:
        saving = [
            pool.submit(checkpoint.save, {f"w{rank}": torch.ones(9)}, tmp_path, rank=rank, world_size=4)
            for rank in range(4)
        ]
        for one in saving:
            one.result(30)
    before = open_files()
    reader = checkpoint.open_reader(tmp_path, timeout=TIMEOUT)
    stored = checkpoint.StoredCheckpoint(reader)
    assert open_files() == before
    for _ in range(2):
        assert all(stored.tensor(f"w{rank}").equal(torch.ones(9)) for rank in range(4))
    assert open_files() <= before + 2
    reader.close()
    assert open_files() == before


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_removes_the_folders_that_it_made(tmp_path, exists):
    (tmp_path / "there").mkdir()
    place = tmp_path / "there" if exists else tmp_path / "a" / "b"
    with pytest.raises(UnsupportedValue):
        checkpoint.save({"w": object()}, place)
    assert [one.name for one in tmp_path.rglob("*")] == ["there"]


def test_a_save_that_fails_while_it_writes_leaves_no_file(tmp_path):
    target, pack = save_of(tmp_path / "c", 1.0)
    target._deadline = Deadline(-1, "late")
    with pytest.raises(TransferTimeout) as caught:
        target.store(pack)
    target.fail(f"{caught.value} \udcff")  # a name of a file that is not UTF-8
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_a_tensor_without_dense_memory_is_named_by_its_key(tmp_path, tensor):
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(UnsupportedValue, match=r"^layer\.weight is a tensor of .*: expected a dense tensor"):
            save({"layer": {"weight": tensor}}, tmp_path / "c")


def test_an_error_with_any_characters_reaches_the_other_ranks(tmp_path):
    facts = save_facts(1, 2, 0, "durable")
    target = DirectoryTarget(tmp_path, facts, Deadline(30, "late"))
    target.begin()
    target.fail("no file \udcff")
    assert (tmp_path / ".saving" / "failed-1").read_text() == "no file \\udcff"


def test_a_save_in_the_background_cannot_be_cancelled(tmp_path):
    saving = checkpoint.async_save({"w": torch.ones(3)}, tmp_path / "c")
    assert not saving.cancel()
    saving.result(30)
    assert (tmp_path / "c" / "checkpoint.json").exists()
