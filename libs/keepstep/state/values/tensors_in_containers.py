"""Find the tensors with memory of their own in nested containers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keepstep.state.values.sharding import is_dtensor
from keepstep.state.values.tensor_subclasses import Wrapped, is_wrapper


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor in ``value``: in mappings, lists, tuples, sets and deques, at any depth.

    A tensor that wraps others, or a DTensor whose shard does, has no memory: those that it wraps are yielded.
    """
    for tensor in outer_tensors_in(value):
        with torch.no_grad():
            local = tensor.to_local() if is_dtensor(tensor) else tensor
        if is_wrapper(local):
            yield from tensors_in(list(Wrapped.of(local).inner.values()))
        else:
            yield tensor


def outer_tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor in ``value``, also one that wraps others. A container is entered once. See ``tensors_in``."""
    pending, entered = [value], dict[int, Any]()
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (Mapping, list, tuple, set, frozenset, deque)) and id(one) not in entered:
            entered[id(one)] = one
            pending += reversed(list(one.values() if isinstance(one, Mapping) else one))
