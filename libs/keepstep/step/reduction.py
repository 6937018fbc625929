"""An all-reduce that the script asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp


@dataclass(frozen=True, slots=True)
class Reduction:
    """A tensor to reduce in place, and how."""

    tensor: torch.Tensor
    """Dense, of any shape."""
    op: ReduceOp | ReduceOp.RedOpType
    average: bool
    """Divide the sum by the number of groups that take part."""
    write_back: Callable[[], None] | None = None
    """Called by ``Collectives.finish``, if the collective succeeded."""
    quantize: bool = False
    """Send 8-bit values. The sum is computed in float32, so float16 does not overflow."""
    refill: Callable[[], None] | None = None
    """Fills ``tensor`` with this group's contribution again, for a retry under another quorum. None: a copy does."""
