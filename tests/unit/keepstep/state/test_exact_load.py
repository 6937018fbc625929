"""A state after a load is compared with the values that were loaded, and torch's casts are undone."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep.state.exact_load import differences, put_back

NAN = float("nan")


def paths(loaded: Any, held: Any) -> list[str]:
    return list(differences(loaded, held, "s"))


@pytest.mark.parametrize(
    ("loaded", "held", "differ"),
    [
        ({"a": 1, "b": [2.0, None]}, OrderedDict(b=(2.0, None), a=1), []),
        ({"a": NAN}, {"a": NAN}, []),
        ({"a": torch.tensor([NAN, -0.0])}, {"a": torch.tensor([NAN, -0.0])}, []),
        ({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}, ["s['a']"]),
        ({"a": torch.ones(2, 3).T}, {"a": torch.ones(3, 2)}, []),
        ({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}, ["s['a']"]),
        ({"a": torch.ones(2)}, {"a": torch.ones(1, 2)}, ["s['a']"]),
        ({"a": torch.ones(2)}, {"a": [1.0, 1.0]}, ["s['a']"]),
        ({"a": 1, "b": 2}, {"a": 1, "c": 3}, ["s['b']", "s['c']"]),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, ["s['a']"]),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, ["s['a'][1]['b']"]),
        ({"a": np.arange(3)}, {"a": np.arange(3)}, []),
        ({"a": np.arange(3)}, {"a": np.arange(3.0)}, ["s['a']"]),
        ({"a": torch.tensor([1 + 2j]).conj()}, {"a": torch.tensor([1 - 2j])}, []),
    ],
)
def test_each_value_that_was_not_restored_is_named_by_its_path(loaded: Any, held: Any, differ: list[str]) -> None:
    assert paths(loaded, held) == differ


@pytest.mark.parametrize("start", [0, 1, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 16, 17])
def test_every_bit_of_a_tensor_counts_wherever_it_begins_and_ends(start: int, count: int) -> None:
    memory = torch.arange(start + count, dtype=torch.uint8)
    loaded = memory[start:]
    held = loaded.clone()
    assert paths(loaded, held) == paths(held, loaded) == []
    for position in (0, count - 1):
        held[position] ^= 128
        assert paths(loaded, held) == paths(held, loaded) == ["s"]
        held[position] ^= 128


def trained() -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for number, one in enumerate(parameters):
        optimizer.state[one] = {"momentum_buffer": torch.rand(one.shape), "all": [{"x": torch.rand(2)}, number]}
    return optimizer, parameters


def test_values_that_torch_casts_are_put_back_into_the_optimizer() -> None:
    loaded = {"step": 3, "optim": copy.deepcopy(trained()[0].state_dict())}
    optimizer, (low, full) = trained()
    optimizer.load_state_dict(loaded["optim"])
    held = {"step": 3, "optim": optimizer.state_dict()}
    assert paths(loaded, held) == ["s['optim']['state'][0]['momentum_buffer']", "s['optim']['state'][0]['all'][0]['x']"]
    put_back(loaded, held)
    assert paths(loaded, {"step": 3, "optim": optimizer.state_dict()}) == []
    assert optimizer.state[low]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(optimizer.state[low]["all"][0]["x"], loaded["optim"]["state"][0]["all"][0]["x"])
    assert torch.equal(optimizer.state[full]["momentum_buffer"], loaded["optim"]["state"][1]["momentum_buffer"])


def test_only_the_states_of_optimizers_are_changed() -> None:
    model = nn.Linear(2, 2).bfloat16()
    own = {"w": torch.ones(2, dtype=torch.bfloat16)}
    loaded = {"model": nn.Linear(2, 2).state_dict(), "own": {"w": torch.rand(2)}}
    put_back(loaded, {"model": model.state_dict(), "own": own})
    assert own["w"].dtype == model.weight.dtype == torch.bfloat16
    assert paths(loaded, {"model": model.state_dict(), "own": own}) == [
        "s['model']['weight']",
        "s['model']['bias']",
        "s['own']['w']",
    ]
