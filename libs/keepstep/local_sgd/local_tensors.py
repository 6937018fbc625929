"""The part of a parameter that this rank holds: all of a plain tensor, the local shard of a DTensor."""

from __future__ import annotations

import torch
from torch import nn

from keepstep.state.values.sharding import is_dtensor


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``t``, for a DTensor of its local shard. The copy has no gradient."""
    return local_tensor(t).clone()


@torch.no_grad()
def local_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return ``t``, for a DTensor its local shard, without a gradient. A write to the result changes ``t``."""
    return t.to_local().detach() if is_dtensor(t) else t.detach()


def as_gradient(local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return ``local`` in the form of a gradient of ``parameter``: a DTensor if that is one."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # slow import

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
