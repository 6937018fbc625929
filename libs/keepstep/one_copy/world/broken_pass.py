"""Make a model usable again after an error has ended its forward or backward pass."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def end_broken_pass(model: nn.Module) -> bool:
    """Drop what a broken pass has left: gathered parameters, collectives in flight, and gradients.

    Args:
        model: its parameters keep their values.

    Returns:
        Whether the model is usable. If not, build another one and load the parameters: torch before 2.13 has no public
        way to end a pass of FSDP2, and an open collective may raise once more.
    """
    roots: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and not any(name.startswith(f"{root}.") or not root for root, _ in roots):
            roots.append((name, module))
    for _, root in roots:
        reset = getattr(root, "reset_iter_state", None)
        if reset is None:
            return False
        try:
            reset()
        except Exception:  # noqa: BLE001  the collective that it waits for has failed; the caller builds the model again
            return False
    for parameter in model.parameters():
        parameter.grad = None
    return True
