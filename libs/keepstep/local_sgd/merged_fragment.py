"""A fragment of a decoupled group: it keeps what the group has trained and no outer step has taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from keepstep.local_sgd.fragment import Fragment
from keepstep.local_sgd.local_tensors import extract_local_tensor, local_tensor


@dataclass(frozen=True, slots=True)
class _Contribution:
    """A contribution to an outer step that did not commit here. It may have committed in other groups."""

    step: int
    """Number of outer steps that were committed before."""
    weight: float
    parameters: list[torch.Tensor]


class MergedFragment(Fragment):
    """A fragment whose parameters are the originals plus the progress of the group since its last contribution.

    While the group is behind, its originals are those of its last outer step. ``catch_up`` replaces them, and the
    progress stays.
    """

    weight: float = 0.0
    """Of the progress: tokens or steps."""
    _doubt: _Contribution | None = None
    _contributed: list[torch.Tensor] | None = None
    """Parameters at the last contribution, if other groups have committed it and this one has not."""

    @property
    def trained_from(self) -> list[torch.Tensor]:
        return super().trained_from if self._contributed is None else self._contributed

    def resolve(self, step: int) -> None:
        """Find out whether an outer step that failed here was committed by others. Then its contribution is merged.

        A contribution is never merged twice. If others failed too, and committed another outer step without this
        group, the contribution is lost.

        Args:
            step: number of committed outer steps of the job.
        """
        doubt, self._doubt = self._doubt, None
        if doubt is not None and step > doubt.step:
            self._contributed = doubt.parameters
            self.weight -= doubt.weight

    def fail(self, step: int) -> None:
        """Note that the outer step after ``step``, to which the group contributed, did not commit here."""
        if self.weight:
            parameters = [extract_local_tensor(one) for one in self._parameters.values()]
            self._doubt = _Contribution(step, self.weight, parameters)

    @torch.no_grad()
    def catch_up(self, state: dict[str, Any]) -> None:
        """Take the originals and the outer optimizer of another group, and keep the progress of this one.

        Args:
            state: ``state_dict`` of a group that is not behind.
        """
        saved = state["original_parameters"]
        for (name, parameter), before in zip(self._parameters.items(), self.trained_from, strict=True):
            local = local_tensor(parameter)
            local.add_(saved[name].to(local.device) - before.to(local.device))
        self.load_state_dict(state)
        self._contributed = None

    def adopt(self) -> None:
        """Step the originals with the average. The parameters become the result."""
        self._restore()
        self._outer_optimizer.step(self._pseudo_gradients)
        self._keep_originals()
        self.weight, self._contributed = 0.0, None

    def start_over(self) -> None:
        """Train from the originals: the group has loaded the state of another, whose progress is not its own."""
        self._restore()
        self.weight, self._contributed, self._doubt = 0.0, None, None
