"""Values that the ranks of one group must have in common, because their collectives follow from them.

A framework has connected the ranks of a group with ``torch.distributed``. A group of one rank needs no connection.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def ranks_of_group() -> int:
    """Return the number of ranks that ``torch.distributed`` connects in this group; 1: none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def largest_of_ranks(values: torch.Tensor) -> None:
    """Replace each value by the largest one of all ranks. ``values``: on the device of the ranks."""
    if ranks_of_group() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)


def any_of_ranks(flag: bool, device: torch.device) -> bool:
    """Return whether ``flag`` is True on any rank."""
    values = torch.tensor([float(flag)], device=device)
    largest_of_ranks(values)
    return bool(values.item())


def of_rank_0(value: int, device: torch.device) -> int:
    """Return the value of rank 0, on all ranks."""
    values = torch.tensor([value], device=device)
    if ranks_of_group() > 1:
        dist.broadcast(values, 0)
    return int(values.item())
