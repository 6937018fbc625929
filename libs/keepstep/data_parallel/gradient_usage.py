"""Find out which parameters have a gradient in any group, in the reduction of the gradients themselves.

Each group sends 1 for a parameter with a gradient, and 0 for one without. A parameter whose sum is 0 keeps no gradient
in any group, as with torch's DistributedDataParallel, so that an optimizer does not decay it. A parameter that only
other groups used gets their average, to which this group contributed zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class GradientUsage:
    """The usage of one backward pass.

    Args:
        parameters: in the order of the flags.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._unset: list[int] = []
        """Numbers of the parameters without a gradient in this group."""
        self._gradients: list[torch.Tensor] = []
        """Results of the reduction for them."""
        self._published: list[bool] = []
        self._flags: torch.Tensor | None = None

    @torch.no_grad()
    def fill(self, flags: torch.Tensor) -> None:
        """Write the flags of this group, before they are reduced in place.

        Args:
            flags: one element for each parameter.
        """
        self._flags = flags
        self._unset = [number for number, one in enumerate(self._parameters) if one.grad is None]
        if not self._unset:
            flags.fill_(1)
            return
        mine = torch.ones(len(self._parameters))
        mine[self._unset] = 0
        flags.copy_(mine)

    def publish(self, *, failed: bool) -> None:
        """Remove the gradients that no group has. They are set, and the flags are reduced.

        Args:
            failed: the step is discarded, and the flags have no meaning.
        """
        if not self._unset:
            return
        self._gradients = [gradient for one in self._unset if (gradient := self._parameters[one].grad) is not None]
        self._set([False] * len(self._unset) if failed else self._used())

    def publish_again(self) -> None:
        """Publish the result of a repeated reduction, in which other groups took part."""
        if self._unset and len(self._gradients) == len(self._unset) and (used := self._used()) != self._published:
            self._set(used)

    def _used(self) -> list[bool]:
        return [] if self._flags is None else (self._flags[self._unset] != 0).tolist()

    def _set(self, used: list[bool]) -> None:
        self._published = used
        for number, gradient, keep in zip(self._unset, self._gradients, used, strict=True):
            self._parameters[number].grad = gradient if keep else None
