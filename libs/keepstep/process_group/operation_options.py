"""Arguments of collectives: torch's options objects, or the plain values in their place."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ReduceOp

Plain = ReduceOp | ReduceOp.RedOpType | timedelta | int | None
"""A reduce op, a timeout, or a root."""
O = TypeVar("O")  # noqa: E741


def as_list(tensors: list[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """Return a list of tensors, also for a single one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def as_options(kind: type[O], given: object, timeout: timedelta | None = None) -> O:
    """Return ``given`` if it is a ``kind``; otherwise a ``kind`` with the plain value set."""
    if type(given) is kind:
        return given
    made: Any = kind()
    match given:
        case None:
            pass
        case ReduceOp():
            made.reduceOp = given
        case timedelta():
            timeout = given
        case int():
            made.rootRank = given
        case _:
            raise TypeError(
                f"invalid options of type {type(given).__name__}: expected {kind.__name__} or a plain value"
            )
    if timeout is not None:
        made.timeout = timeout
    return cast("O", made)
