"""The outer optimizer of one fragment. Fragments may share an optimizer: each one steps its own parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.local_sgd.layout import in_optimizer
from keepstep.local_sgd.local_tensors import as_gradient


class OuterOptimizer:
    """An optimizer, restricted to the parameters of one fragment.

    Args:
        optimizer: holds ``parameters``, and perhaps those of other fragments.
        parameters: of the fragment.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Step the parameters of the fragment with ``gradients``, one local tensor each.

        The gradients of the inner optimizer, which the parameters hold, are the same afterwards.
        """
        everything = in_optimizer(self._optimizer)
        held = [parameter.grad for parameter in everything]
        try:
            for parameter in everything:
                parameter.grad = None
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = as_gradient(gradient, parameter)
            self._optimizer.step()
        finally:
            for parameter, own in zip(everything, held, strict=True):
                parameter.grad = own

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer without that of other fragments."""
        whole, own = self._optimizer.state_dict(), self._indices()
        return {**whole, "state": {index: value for index, value in whole["state"].items() if index in own}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. The state of other fragments stays."""
        whole, own = self._optimizer.state_dict(), self._indices()
        others = {index: value for index, value in whole["state"].items() if index not in own}
        self._optimizer.load_state_dict({**state_dict, "state": {**others, **state_dict["state"]}})

    def _indices(self) -> set[int]:
        """Return the numbers by which the state of the optimizer names the parameters of the fragment."""
        own = {id(parameter) for parameter in self._parameters}
        return {index for index, one in enumerate(in_optimizer(self._optimizer)) if id(one) in own}
