"""Tensors that wrap others in a sharded state: as objects and values without sharding, but not in parts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from keepstep.sharded import CheckpointingException, ShardedObject, ShardedTensor, load, save
from tests.support.models.wrapped_tensor import parts, scaled

FORMATS = [("keepstep", 1), ("torch_dist", 1)]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_each_wrapper_is_loaded_with_its_own_numbers(tmp_path, form, in_background) -> None:
    values = [scaled(1), scaled(2)]
    state = {
        "objects": {str(n): ShardedObject(f"o{n}", one, (1,), (0,)) for n, one in enumerate(values)},
        "common": {"first": values[0], "second": values[1], "milestones": Counter({3: 1})},
    }
    request = save(state, tmp_path, form, async_sharded_save=in_background)
    if request is not None:
        values[0].codes.zero_()
        request.execute_sync()
    wanted = {"objects": {str(n): ShardedObject(f"o{n}", None, (1,), (0,)) for n in range(2)}}
    loaded = load(wanted, tmp_path)
    for found in (loaded["objects"].values(), (loaded["common"]["first"], loaded["common"]["second"])):
        assert [parts(one) for one in found] == [parts(scaled(1)), parts(scaled(2))]
    assert loaded["common"]["milestones"] == Counter({3: 1})


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_a_wrapper_is_refused_as_a_part_of_a_tensor(tmp_path, form, in_background) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", scaled(1))}
    with pytest.raises(CheckpointingException, match=r"ShardedTensor 'w' has a .*RegisteredTensor as data"):
        save(state, tmp_path, form, async_sharded_save=in_background)


@pytest.mark.parametrize("form", FORMATS)
def test_a_conversion_that_drops_parts_of_numbers_is_an_error(tmp_path, form) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2) / 2)}, tmp_path, form)
    with pytest.raises(CheckpointingException, match=r"'w' is torch.float32 in the checkpoint, but torch.int64"):
        load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2, dtype=torch.int64))}, tmp_path)
