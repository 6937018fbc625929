"""The state of an optimizer is sharded as its parameters are."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch

from keepstep.sharded import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    save,
)
from keepstep.sharded.optimizer import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)


def trained():
    """A linear layer of rank 1 of 2, its sharded leaves, and the state of Adam after a step."""
    model = torch.nn.Linear(3, 2)
    values = model.state_dict(keep_vars=True)
    leaves = {
        "weight": ShardedTensor.from_rank_offsets("w", values["weight"], (0, 1, 2), replica_id=(0, 3)),
        "bias": ShardedTensorFactory("b", values["bias"], dict, torch.cat),
    }
    adam = {
        "state": {
            number: {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(one), "exp_avg_sq": torch.rand_like(one)}
            for number, one in enumerate(model.parameters())
        },
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    }
    return model, adam, {"model": [leaves]}


@pytest.mark.parametrize("exclude_keys", [("step",), "step"], ids=["names", "a name, as Megatron Core passes it"])
def test_each_state_tensor_gets_the_sharding_of_its_parameter(exclude_keys) -> None:
    model, adam, leaves = trained()
    state, before = dict(adam), copy.deepcopy(adam)
    found = get_param_id_to_sharded_param_map(leaves, model.parameters())
    optim_state_to_sharding_state(state, found, exclude_keys=exclude_keys)
    average = state["state"][0]["exp_avg"]
    assert (average.key, average.global_offset, average.replica_id) == ("optimizer.state.exp_avg.w", (2, 0), (0, 3))
    assert torch.equal(average.data, before["state"][0]["exp_avg"])
    factory = state["state"][1]["exp_avg_sq"]
    assert (type(factory), factory.key) == (ShardedTensorFactory, "optimizer.state.exp_avg_sq.b")
    assert torch.equal(factory.data, before["state"][1]["exp_avg_sq"])
    assert set(state["state"][0]) == {"exp_avg", "exp_avg_sq"}
    (group,) = state["param_groups"]
    assert isinstance(group["params"], LocalNonpersistentObject)
    assert group["params"].unwrap() == [0, 1]
    assert group["lr"] == 0.1
    assert adam["param_groups"] == before["param_groups"], "the groups of the optimizer itself were changed"


def test_state_of_another_dtype_keeps_it_and_of_another_shape_is_refused() -> None:
    _, _, leaves = trained()
    leaf = leaves["model"][0]["weight"]
    assert make_sharded_optimizer_tensor(leaf, torch.zeros(2, 3, dtype=torch.float64), "m").dtype == torch.float64
    with pytest.raises(CheckpointingException, match=r"'m\.w' has shape \(\), but its parameter has \(2, 3\).*'step'"):
        make_sharded_optimizer_tensor(leaf, torch.tensor(1.0), "m")
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(4), (2, 3), flattened_range=slice(1, 5))
    assert make_sharded_optimizer_tensor(flat, torch.ones(4), "m").flattened_range == slice(1, 5)


def test_a_state_that_is_refused_is_not_changed() -> None:
    model, state, leaves = trained()
    found = get_param_id_to_sharded_param_map(leaves, model.parameters())
    with pytest.raises(CheckpointingException, match=r"optimizer\.state\.step\.w"):
        optim_state_to_sharding_state(state, found)
    with pytest.raises(ValueError, match=r"parameter 1 of the optimizer has no sharded leaf.*\[0\]"):
        optim_state_to_sharding_state(state, {0: found[0]}, exclude_keys=("step",))
    assert isinstance(state["state"][0]["exp_avg"], torch.Tensor)
    assert state["param_groups"][0]["params"] == [0, 1]
    with pytest.raises(ValueError, match=r"has no \['param_groups', 'state'\]"):
        optim_state_to_sharding_state({}, {})


def test_a_parameter_that_is_given_twice_has_its_first_number() -> None:
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    assert get_optim_param_to_id_map([one, two, one]) == {id(one): 0, id(two): 1}


def test_leaves_of_copies_of_the_parameters_are_a_warning(caplog) -> None:
    model, _, _ = trained()
    copied = {"w": ShardedTensor.from_rank_offsets("w", model.weight.detach())}
    with caplog.at_level(logging.WARNING):
        assert get_param_id_to_sharded_param_map(copied, model.parameters()) == {}
    assert "keep_vars=True" in caplog.text


SHAPES = {"a": (7, 3), "b": (11,), "c": (5, 13), "d": (1,)}
"""Of the parameters in the buffer of a distributed optimizer."""


def ranges_of(dp):
    """Return ``{rank: {parameter: range of it}}`` of a buffer that is padded to equal parts of multiples of 8."""
    total = sum(math.prod(shape) for shape in SHAPES.values())
    part = -(-total // (8 * dp)) * 8
    found = {rank: {} for rank in range(dp)}
    for rank, ranges in found.items():
        start = 0
        for name, shape in SHAPES.items():
            size = math.prod(shape)
            first, last = max(rank * part - start, 0), min((rank + 1) * part - start, size)
            if first < last:
                ranges[name] = slice(first, last)
            start += size
    return found


def distributed_state(dp, values):
    """Return the state of all ranks of a distributed optimizer, of which each has ranges of flattened parameters."""
    flat = ShardedTensor.from_rank_offsets_flat
    return {
        f"rank {rank}": {
            f"{kind}.{name}": flat(f"{kind}.{name}", values(name)[part], SHAPES[name], flattened_range=part)
            for name, part in ranges.items()
            for kind in ("param", "exp_avg")
        }
        for rank, ranges in ranges_of(dp).items()
    }


@pytest.mark.parametrize("form", [("keepstep", 1), ("torch_dist", 1)])
def test_the_state_of_a_distributed_optimizer_is_loaded_with_another_number_of_ranks_and_back(tmp_path, form) -> None:
    saved = lambda name: torch.arange(1.0, 1.0 + math.prod(SHAPES[name]))  # noqa: E731
    empty = lambda name: torch.zeros(math.prod(SHAPES[name]))  # noqa: E731
    source = tmp_path / "2"
    save(distributed_state(2, saved), source, form)
    for step, dp in enumerate((4, 3, 1, 2)):
        request = distributed_state(dp, empty)
        loaded = load(request, source, strict="raise_all")
        for rank, ranges in ranges_of(dp).items():
            assert sum(part.stop - part.start for part in ranges.values()) > 0
            for name, part in ranges.items():
                assert torch.equal(loaded[f"rank {rank}"][f"exp_avg.{name}"], saved(name)[part]), (dp, rank, name)
        source = tmp_path / f"{step}-{dp}"
        save(request, source, form)
