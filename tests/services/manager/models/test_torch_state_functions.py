"""States that torch's get_optimizer_state_dict returns: it steps an optimizer that has no state yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from keepstep import DistributedDataParallel, Optimizer
from keepstep.local_sgd import LocalSGD
from tests.services.manager.groups import manager, together

STEPS = 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam, learning rate in a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
}


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def _loss(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(8.0).view(2, 4)).square().sum()


def _trained_by_torch(optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = optimizer_of(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("wrapped", [False, True], ids=["of the optimizer", "of its wrapper"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_whose_state_is_asked_for_before_the_first_step_train_as_torch_does_without(lighthouse, name, wrapped):
    """torch 2.13 leaves a step counted, and a learning rate of zero if that step raises."""

    models = [_model(), _model()]

    def group(number: int) -> dict[str, torch.Tensor]:
        model = models[number]
        inner = OPTIMIZERS[name](model.parameters())
        parts: list[Any] = [model, inner]

        def save() -> Any:
            return get_state_dict(*parts)

        def load(state: Any) -> None:
            set_state_dict(*parts, model_state_dict=state[0], optim_state_dict=state[1])

        with manager(lighthouse, f"r{number}", min_replica_size=2) as m:
            m.register_state_dict_fn("training", load, save)
            ddp, optimizer = DistributedDataParallel(m, model), Optimizer(m, inner)
            if wrapped:
                parts[1] = optimizer
            while m.current_step() < STEPS:
                optimizer.zero_grad()
                _loss(ddp).backward()
                optimizer.step()
            return model.state_dict()

    states = together(lambda: group(0), lambda: group(1))
    for key, value in _trained_by_torch(OPTIMIZERS[name]).items():
        assert [state[key].tolist() for state in states] == [value.tolist()] * 2, key


def test_a_state_that_is_asked_for_in_a_block_of_local_steps_counts_as_no_step(lighthouse):
    model = _model()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    with manager(lighthouse, "r0") as m, LocalSGD(m, model, inner, sync_every=2):
        get_state_dict(model, inner)
        inner.zero_grad()
        _loss(model).backward()
        inner.step()
        assert m.current_step() == 0
        inner.zero_grad()
        _loss(model).backward()
        inner.step()
        assert m.current_step() == 1
        assert {state["step"].item() for state in inner.state.values()} == {2}
