"""Checkpoints in the zarr format, which Megatron Core wrote until 0.15.

``golden`` has one of two tensor-parallel ranks: ``library_peer.py megatron save 2x1z DIRECTORY`` with megatron-core
0.15.3, zarr 2.18.7, and tensorstore 0.1.86.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch

from keepstep.sharded import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load,
    load_plain_tensors,
    load_sharded_metadata,
    maybe_load_config,
    save,
)
from tests.support import checkpoints
from tests.support.checkpoints.library_peer import World

whole = ShardedTensor.from_rank_offsets


@pytest.fixture
def directory(tmp_path):
    with zipfile.ZipFile(Path(checkpoints.__file__).parent / "golden" / "megatron-0.15.3-2x1z.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_a_zarr_checkpoint_of_megatron_is_read_with_every_value(directory) -> None:
    assert maybe_load_config(directory).sharded_backend == "zarr"
    world = World("keepstep", "1x1z", 0)
    world.load(str(directory))  # compares
    state, missing, unexpected = load(world.state(is_save=False), directory, strict="return_all")
    assert (state["rng"], missing, unexpected) == ({"seed": 5}, set(), set())
    assert "rng/shard_0_1" in load_sharded_metadata(directory)


def test_parts_that_no_rank_stored_are_read_from_a_zarr_checkpoint(directory) -> None:
    plain = load_plain_tensors(directory)["projection"]
    assert plain.dtype is torch.bfloat16
    data = torch.zeros(3, 5)
    part = ShardedTensor("projection", data, data.dtype, (3, 5), (4, 8), (1, 2), None)
    load({"p": part}, directory, validate_access_integrity=False)
    assert torch.equal(data, plain[1:4, 2:7].float())
    flat = ShardedTensor.from_rank_offsets_flat("projection", torch.zeros(9), (4, 8), flattened_range=slice(6, 15))
    assert load({"p": flat}, directory, validate_access_integrity=False)["p"].tolist() == plain.flatten()[6:15].tolist()
    padded = load({"p": whole("projection", torch.ones(5, 8), allow_shape_mismatch=True)}, directory)["p"]
    assert torch.equal(padded, torch.cat([plain.float(), torch.zeros(1, 8)]))


def test_an_object_of_an_old_version_is_found_without_the_size_of_its_last_axis(directory) -> None:
    file = directory / "rng" / "shard_0_1.pt"
    for offset in ("0.0", "0.1"):
        (directory / "rng" / f"shard_{offset}_1.pt").write_bytes(file.read_bytes())
    file.unlink()
    assert "rng/shard_0.1_1.2" in load_sharded_metadata(directory)
    assert load({"o": ShardedObject("rng", None, (1, 2), (0, 1))}, directory, validate_access_integrity=False)["o"]


def test_a_damaged_zarr_checkpoint_names_file_and_key(directory) -> None:
    part = directory / "norm" / "0"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointingException, match=r"norm/0, a part of 'norm', has 19 bytes, expected 20"):
        load_plain_tensors(directory)
    part.unlink()
    with pytest.raises(CheckpointingException, match=r"norm/0, a part of 'norm', not found"):
        load_plain_tensors(directory)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"compressor": {"id": "blosc"}},
            r"'norm' is stored with compressor \{'id': 'blosc'\}, but Megatron Core wrote",
        ),
        ({"dtype": ">f4"}, r"'norm' is stored as '>f4': expected \|b1, "),
        ({"chunks": [0]}, r"norm/\.zarray has shape \(5,\), chunks \(0,\)"),
        ({"shape": "x"}, r"norm/\.zarray does not describe an array: ValueError: x: expected a list of sizes"),
    ],
)
def test_an_array_that_megatron_did_not_write_is_refused_by_name(directory, change, text) -> None:
    path = directory / "norm" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointingException, match=text):
        load_plain_tensors(directory)


def test_zarr_is_not_written(tmp_path) -> None:
    with pytest.raises(CheckpointingException, match=r"default strategy for: \('save_sharded', 'zarr', 1\); regist"):
        save({"w": whole("w", torch.ones(2))}, tmp_path, ("zarr", 1))
