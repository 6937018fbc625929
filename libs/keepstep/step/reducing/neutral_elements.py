"""Elements that leave the result of a reduction unchanged: the contribution of a group that does not take part."""

from __future__ import annotations

import math

import torch
from torch.distributed import ReduceOp


def neutral_element(reduce_op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> float | int | bool:
    """Return the neutral element of ``reduce_op`` for tensors of ``dtype``.

    Raises:
        ValueError: it has none, or the order of the elements is not defined (complex numbers).
    """
    if reduce_op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.BOR, ReduceOp.BXOR):
        return 0
    if reduce_op == ReduceOp.PRODUCT:
        return 1
    if reduce_op == ReduceOp.BAND:
        return True if dtype is torch.bool else -1 if dtype.is_signed else torch.iinfo(dtype).max
    if reduce_op in (ReduceOp.MAX, ReduceOp.MIN) and not dtype.is_complex:
        largest = reduce_op == ReduceOp.MIN
        if dtype is torch.bool:
            return largest
        if dtype.is_floating_point:
            return math.inf if largest else -math.inf
        return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min
    raise ValueError(
        f"{reduce_op} on {dtype} has no neutral element, which a group that does not take part must contribute; use "
        "another operation"
    )
