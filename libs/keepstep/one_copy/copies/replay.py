"""Repeat the steps of an optimizer on a slice of parameters, from a base and the gradients of the steps since."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

REPLAYED: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose step changes each element of a shard by itself: a step of a part of the parameters has the same
bits as that part of a step of all. Adafactor, Muon and LBFGS are not among them."""


def can_replay(optimizer: Optimizer) -> bool:
    """Return whether the steps of ``optimizer`` can be repeated on a slice. Subclasses may do more than their base."""
    return type(optimizer) in REPLAYED


def replay(
    kind: Callable[..., Optimizer],
    base: dict[str, Any],
    steps: Iterable[tuple[list[dict[str, Any]], dict[str, torch.Tensor]]],
    device: torch.device,
) -> dict[str, Any]:
    """Return the state of a slice after some steps.

    Args:
        kind: class of the optimizer, one of ``REPLAYED``.
        base: of the slice, as ``RankState.base`` returns it. Its tensors are changed if they are on ``device``.
        steps: of each step the options of the parameter groups, and the gradients of the slice by name. Each is asked
            for when the one before is done.
        device: on which the optimizer of the rank steps: others may give other bits.
    """
    rest = iter(steps)
    first = next(rest, None)
    if first is None:
        return base
    parameters = {name: one["parameter"].detach().to(device) for name, one in base.items()}
    trained = {name: one["group"] for name, one in base.items() if one["group"] is not None}
    options = first[0]
    numbers = sorted(set(trained.values()))
    groups = [
        {**options[number], "params": [parameters[name] for name, own in trained.items() if own == number]}
        for number in numbers
    ]
    if not groups:
        return base
    optimizer = kind(groups)
    for name in trained:
        state = {
            key: value.to(device)
            if isinstance(value, torch.Tensor) and value.shape == parameters[name].shape
            else value
            for key, value in base[name]["state"].items()
        }
        if state:
            optimizer.state[parameters[name]] = state
    for options, gradients in itertools.chain([first], rest):
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group.update(options[number])
        for name in trained:
            gradient = gradients.get(name)
            parameters[name].grad = None if gradient is None else gradient.to(device)
        optimizer.step()
    return {
        name: {
            "parameter": parameters[name],
            "group": one["group"],
            "state": dict(optimizer.state.get(parameters[name], {})) if name in trained else one["state"],
        }
        for name, one in base.items()
    }
