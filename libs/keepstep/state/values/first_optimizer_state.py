"""The step that torch takes to create the state of an optimizer, when the state is asked for before the first step.

``get_optimizer_state_dict``, ``set_optimizer_state_dict`` and their relatives (torch 2.13,
torch.distributed.checkpoint.state_dict) step an optimizer without state once, with gradients and learning rates of
zero, and keep what that step left. The weights stay, but Adam has counted a step that no batch trained. A group that
asked for its state and one that did not would train differently.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch.optim import Optimizer

DEPTH = 12
"""Calls between torch's function and the hooks of an optimizer."""


def creating_state() -> bool:
    """Return whether torch calls this to create the state of an optimizer."""
    torch_module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if torch_module is None:
        return False
    function = torch_module._init_optim_state.__code__  # noqa: SLF001  torch gives no public sign of such a step
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    for _ in range(DEPTH):
        if frame is None or frame.f_code is function:
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def count_from_zero(optimizer: Optimizer) -> None:
    """Let the state of ``optimizer`` be that before its first step, as the first step itself would create it.

    The averages are zero anyway. Left as torch leaves them: momentum of SGD with dampening (zero, where the first
    step takes the gradient), and the step sizes of ASGD and Rprop, which torch computes from a learning rate of zero.
    """
    for state in optimizer.state.values():
        for name, first in (("step", 0), ("mu_product", 1)):
            value = state.get(name)
            if isinstance(value, torch.Tensor):
                value.fill_(first)
            elif value is not None:
                state[name] = first
