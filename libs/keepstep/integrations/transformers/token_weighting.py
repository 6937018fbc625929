"""The average of gradients over groups whose batches have different numbers of tokens, as over those of torchrun.

A group does not know the tokens of the others in its forward pass, so it computes the gradient of the sum over its own
tokens. These sums and the numbers of tokens are averaged over the groups, and their quotient is the gradient of the
mean over all tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from keepstep.manager import Manager

TINY = 1e-6
"""In place of a mean of 0 tokens. With one token in a million groups the mean is as small."""


class TokenWeighting:
    """Weights the gradients of this group by its number of tokens.

    Args:
        manager: of this replica group.
        accelerator: whose ``backward`` computes the gradients.
        model: of the group, whose gradients are averaged at the end of a backward pass.
    """

    def __init__(self, manager: Manager, accelerator: Any, model: nn.Module) -> None:
        self._manager, self._accelerator, self._model = manager, accelerator, model

    @contextlib.contextmanager
    def of(self, tokens: torch.Tensor | int) -> Iterator[torch.Tensor]:
        """Weight the backward passes in the block. The last one of a step divides the averaged gradients.

        Args:
            tokens: of this group in the step, over all batches of an accumulation.

        Yields:
            The divisor of the loss: 1 instead of 0, which would give a NaN.
        """
        accelerator = self._accelerator
        number = torch.as_tensor(tokens).detach().clone().to(torch.float64)
        at_least_one = number.clamp(min=1)
        backward = accelerator.backward

        def weighted(loss: torch.Tensor, **kwargs: Any) -> None:
            backward(loss * at_least_one.to(loss.device, loss.dtype), **kwargs)

        accelerator.backward = weighted
        try:
            yield at_least_one.to(torch.as_tensor(tokens).dtype)
        finally:
            accelerator.backward = backward
        if accelerator.sync_gradients:
            self._divide(number)

    def _divide(self, tokens: torch.Tensor) -> None:
        gradients = [one.grad for one in self._model.parameters() if one.grad is not None]
        mean = tokens.to(gradients[0].device) if gradients else tokens
        if self._manager.allreduce(mean).wait() and gradients:
            torch._foreach_div_(gradients, max(mean.item(), TINY))
