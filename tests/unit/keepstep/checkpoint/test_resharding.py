"""A state that was saved with any sharding is loaded with any other, bit for bit, the optimizer's too.

The ranks of a job are built one after the other in this process (``sharded_worlds``): a save needs no communication, so
real processes would show nothing more. tests/services/checkpoint has some.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.checkpoint import CheckpointError, StoredCheckpoint
from keepstep.checkpoint.loading import load_leaves
from keepstep.state.flattening import flatten
from keepstep_formats.torch_storage import check_boxes
from tests.support.checkpoints.sharded_worlds import LAYOUTS, cut, fake_rank, in_memory, parts_of, states

INTO = [("plain", 1), ("fsdp", 1), ("fsdp", 4), ("hsdp", 4), ("fsdp and tensor parallel", 4)]
INTO += [(layout, 2) for layout in LAYOUTS]


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def emptied(value):
    """Return a state of the same form with other values."""
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        local_tensor = torch.full_like(value.to_local(), -7)
        mesh, placements = value.device_mesh, value.placements
        return DTensor.from_local(
            local_tensor, mesh, placements, shape=value.shape, stride=value.stride(), run_check=False
        )
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, -7)
    return [emptied(item) for item in value] if isinstance(value, list) else None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_layout_is_loaded_into_every_other(layout, world_size):
    reader = in_memory([parts_of(state) for state in states(layout, world_size)])
    stored = StoredCheckpoint(reader)
    for into in INTO:
        for rank, expected in enumerate(states(*into)):
            state, wanted_leaves = emptied(expected), flatten(expected)
            load_leaves(state, stored, strict=True)
            for key, leaf in flatten(state).items():
                wanted = wanted_leaves[key].value
                if isinstance(wanted, torch.Tensor):
                    assert local(leaf.value).equal(local(wanted)), (into, rank, key)
                else:
                    assert leaf.value == wanted, (into, rank, key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_saved_once(layout):
    reader = in_memory([parts_of(state) for state in states(layout, 2)])
    alone = in_memory([parts_of(state) for state in states("plain", 1)])
    stored, single = StoredCheckpoint(reader), StoredCheckpoint(alone)
    assert stored.tensors.keys() == single.tensors.keys()
    for key, tensor in stored.tensors.items():
        volume = sum(shard.box.volume for shard in tensor.shards)
        assert volume == sum(shard.box.volume for shard in single.tensors[key].shards)
    shards = [shard for tensor in stored.tensors.values() for shard in tensor.shards]
    sizes = [sum(shard.box.volume for shard in shards if shard.rank == rank) for rank in range(2)]
    assert abs(sizes[0] - sizes[1]) < 0.2 * sum(sizes), "one rank writes much more than the other"


def test_a_quarter_of_a_tensor_reads_a_quarter_of_its_bytes():
    whole = torch.arange(64 * 1000.0).reshape(64, 1000)
    reader = in_memory([parts_of({"w": whole})])
    stored = StoredCheckpoint(reader)
    with fake_rank(1, 4):
        mesh = torch.distributed.init_device_mesh("cpu", (4,))
        target = DTensor.from_local(torch.zeros(16, 1000), mesh, [Shard(0)])
        load_leaves({"w": target}, stored, strict=True)
        assert target.to_local().equal(whole[16:32])
    assert reader.read_bytes == whole.nbytes / 4


@pytest.mark.parametrize("size", [16, 13, 3])
def test_shards_of_several_parts_are_stored_where_they_belong(size):
    whole = torch.arange(size * 2.0).reshape(size, 2)
    for placements in ([Shard(0), _StridedShard(0, split_factor=2)], [_StridedShard(0, split_factor=2), Shard(0)]):
        ranks = []
        for rank in range(4):
            with fake_rank(rank, 4):
                mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
                like = DTensor.from_local(torch.zeros(0), mesh, placements, run_check=False)
                ranks.append(parts_of({"w": cut(whole, like)}))
        stored = StoredCheckpoint(in_memory(ranks))
        loaded = {"w": torch.zeros_like(whole)}
        load_leaves(loaded, stored, strict=True)
        assert loaded["w"].equal(whole)


def test_torch_is_not_trusted_with_a_shard_of_several_parts():
    whole, placements = torch.arange(16.0).reshape(8, 2), [Shard(0), _StridedShard(0, split_factor=2)]
    planner = DefaultLoadPlanner()
    with fake_rank(0, 4):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
        planner.state_dict = {"w": cut(whole, DTensor.from_local(torch.zeros(0), mesh, placements, run_check=False))}
        with pytest.raises(CheckpointError, match=r"w has a shard of several parts \(\[0:1, 0:2\], \[2:3, 0:2\]\)"):
            check_boxes(planner)


def test_a_partial_dtensor_is_refused():
    with fake_rank(0, 2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        with pytest.raises(TypeError, match=r"w is a partial DTensor \(P\(sum\)\): reduce it first"):
            parts_of({"w": partial})
        replicated = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        with pytest.raises(CheckpointError, match="missing shards of ranks 1: this checkpoint has 1 ranks"):
            in_memory([parts_of({"w": replicated})])
