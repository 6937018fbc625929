"""Training with codecs on a real problem ends close to training in full precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keepstep.collectives.codecs import Quantized, TopK, TwoBit
from tests.unit.keepstep.collectives.conftest import Ranks

GROUPS, ROUNDS, INNER = 2, 20, 3


def data() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # takes more than a second, in each pytest process if not here

    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def train(ranks: Ranks | None) -> float:
    """Train as DiLoCo does: inner SGD in each group, outer SGD on the averaged change. Return the final loss."""
    inputs, targets = data()
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)) for _ in range(GROUPS)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    shared = [parameter.detach().clone() for parameter in models[0].parameters()]
    inner = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    order = torch.Generator().manual_seed(1)
    for _ in range(ROUNDS):
        for model, optimizer in zip(models, inner, strict=True):
            for _ in range(INNER):
                chosen = torch.randint(0, len(targets), (64,), generator=order)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
        changes = [[a - b.detach() for a, b in zip(shared, model.parameters(), strict=True)] for model in models]
        if ranks is None:
            average = [torch.stack(same).mean(0) for same in zip(*changes, strict=True)]
        else:
            average = ranks.average(changes)[0]
        for parameter, change in zip(shared, average, strict=True):
            parameter.grad = change
        outer.step()
        for model in models:
            for parameter, value in zip(model.parameters(), shared, strict=True):
                parameter.data.copy_(value)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(models[0](inputs), targets))


def test_the_loss_is_close_to_that_of_full_precision(ranks):
    exact = train(None)
    losses = [train(ranks(GROUPS, make)) for make in (Quantized, TwoBit, lambda: TopK(1 / 16))]
    assert exact < 0.3  # it learned: a guess has 2.3
    assert losses[0] == pytest.approx(exact, rel=0.1)
    assert losses[1:] == pytest.approx([exact] * 2, rel=0.5)
