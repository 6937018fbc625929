"""Sharded tensors as values that ``torch.distributed.checkpoint`` itself saves and loads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from keepstep.sharded import CheckpointingException, ShardedTensor
from keepstep.sharded.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def parts(count: int, values: torch.Tensor) -> LocalShardsContainer:
    """A tensor that is cut along its first axis."""
    cut = [
        ShardedTensor.from_rank_offsets("w", one.clone(), (0, at, count)) for at, one in enumerate(values.chunk(count))
    ]
    return LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(one) for one in cut])


def test_parts_are_saved_and_loaded_into_other_parts(tmp_path) -> None:
    values = torch.arange(24.0, dtype=torch.bfloat16).view(12, 2)
    dcp.save({"w": parts(3, values)}, checkpoint_id=tmp_path)
    request = parts(4, torch.zeros_like(values))
    dcp.load({"w": request}, checkpoint_id=tmp_path)
    assert torch.equal(torch.cat([one.data for one in request.parts]), values)
    plain = {"w": torch.zeros_like(values)}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert torch.equal(plain["w"], values)


def test_a_layer_of_a_stack_is_a_part(tmp_path) -> None:
    layer = lambda at, one: CheckpointableShardedTensor.from_sh_ten(  # noqa: E731
        ShardedTensor.from_rank_offsets("w", one, (0, at, 2), prepend_axis_num=1)
    )
    dcp.save(
        {"w": LocalShardsContainer([layer(at, torch.full((3,), at + 1.0)) for at in range(2)])}, checkpoint_id=tmp_path
    )
    second = torch.zeros(3)
    dcp.load({"w": layer(1, second)}, checkpoint_id=tmp_path)
    assert second.tolist() == [2.0] * 3, "its own memory"


def test_what_cannot_be_a_value_is_refused() -> None:
    whole = ShardedTensor.from_rank_offsets("w", torch.ones(4))
    with pytest.raises(CheckpointingException, match="local_shards is empty"):
        LocalShardsContainer([])
    for one in (
        whole.without_data(),
        ShardedTensor.from_rank_offsets_flat("w", torch.ones(2), (4,), flattened_range=slice(0, 2)),
    ):
        with pytest.raises(CheckpointingException, match=r"'w' cannot be saved by dcp\.save: expected data"):
            CheckpointableShardedTensor.from_sh_ten(one)
    value = CheckpointableShardedTensor.from_sh_ten(whole)
    assert (value.shape, value.dtype, "key='w'" in repr(value)) == ((4,), torch.float32, True)
    with pytest.raises(NotImplementedError, match="has no memory of its own for aten"):
        value + 1
    with pytest.raises(CheckpointingException, match=r"'w' has no part at torch\.Size"):
        value.__get_tensor_shard__(dcp.metadata.MetadataIndex("w", (2,)))
