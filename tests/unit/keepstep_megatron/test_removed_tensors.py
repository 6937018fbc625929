"""Removal of tensors from a ``torch_dist`` checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from keepstep.sharded import (
    CheckpointingException,
    FullyParallelLoadStrategyWrapper,
    ShardedObject,
    ShardedTensor,
    load,
    load_plain_tensors,
    load_sharded_metadata,
    remove_sharded_tensors,
    save,
)
from keepstep.sharded.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(path, separation_hint=None):
    whole = ShardedTensor.from_rank_offsets
    state = {
        "w": whole("model.w", torch.arange(6.0)),
        "flat": ShardedTensor.from_rank_offsets_flat("model.f", torch.ones(4), (2, 2), flattened_range=slice(0, 4)),
        "moments": whole("optimizer.m", torch.ones(1000)),
        "groups": ShardedObject("optimizer.groups", [1, 2], (1,), (0,)),
        "step": 3,
    }
    save(state, path, TorchDistSaveShardedStrategy(separation_hint=separation_hint))
    return {file.name for file in path.glob("*.distcp")}


def left(path):
    """The keys and values of a checkpoint, as each reader sees them."""
    plain, into = load_plain_tensors(path), {"model.w": torch.zeros(6)}
    dcp.load(into, checkpoint_id=path, no_dist=True)
    assert torch.equal(into["model.w"], plain["model.w"])
    assert load({}, path)["step"] == 3
    return sorted(load_sharded_metadata(path)), plain["model.w"].tolist(), plain["model.f"].tolist()


KEPT = (["model.f", "model.w"], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [[1.0, 1.0], [1.0, 1.0]])


def test_tensors_and_objects_with_a_prefix_are_removed_with_their_files(tmp_path, caplog) -> None:
    files = saved(tmp_path, "optimizer")
    remove_sharded_tensors(tmp_path, "optimizer")
    assert left(tmp_path) == KEPT
    assert {file.name for file in tmp_path.glob("*.distcp")} == {one for one in files if one.startswith("__")}
    assert "bytes of removed values stay" not in caplog.text


def test_values_in_files_with_others_are_removed_and_their_bytes_named(tmp_path, caplog) -> None:
    files = saved(tmp_path)
    FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()).remove_sharded_tensors(tmp_path, "optimizer")
    assert left(tmp_path) == KEPT
    assert {file.name for file in tmp_path.glob("*.distcp")} < files, "the tensor of 1,000 elements had one of its own"
    assert "bytes of removed values stay" in caplog.text


def test_nothing_else_is_removed(tmp_path, caplog) -> None:
    files = saved(tmp_path)
    before = left(tmp_path)
    remove_sharded_tensors(tmp_path, "moments")
    assert "no key begins with the prefix" in caplog.text
    with pytest.raises(CheckpointingException, match="was not changed: key_prefix is empty, and would remove every"):
        remove_sharded_tensors(tmp_path, "")
    assert (left(tmp_path), {file.name for file in tmp_path.glob("*.distcp")}) == (before, files)
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, tmp_path / "native")
    with pytest.raises(CheckpointingException, match=r"cannot remove 'w' from .*: save the state without it"):
        remove_sharded_tensors(tmp_path / "native", "w")
