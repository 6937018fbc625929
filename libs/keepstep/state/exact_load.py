"""Compare a state after a load with the values that were loaded, and put back those that torch has cast.

``torch.optim.Optimizer.load_state_dict`` casts each floating-point value of its state to the dtype of the parameter,
except ``step``: momentum in float32 of parameters in bfloat16 loses its low bits, and the group that loaded it trains
apart from the source. ``Optimizer.state_dict`` returns the dicts of the optimizer's own state, so a value can be put
back into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch

from keepstep.state.values.sharding import is_dtensor

_ABSENT = object()
_WORD = 8
"""Bytes of an int64."""


def with_own_containers(value: Any) -> Any:
    """Return ``value`` with copies of its dicts, lists and tuples, as dicts and lists.

    A load may change those that it gets: that of torch 2.13's CyclicLR removes a key.
    """
    if isinstance(value, Mapping):
        return {key: with_own_containers(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_own_containers(one) for one in value]
    return value


def put_back(loaded: Any, held: Any) -> bool:
    """Put tensors of ``loaded`` that have another dtype in ``held`` back into the states of optimizers in ``held``.

    Args:
        loaded: what ``state_dict`` of another group returned.
        held: what ``state_dict`` of this group returns now. Not changed outside of optimizers' states.

    Returns:
        Whether a tensor was put back.
    """
    if not isinstance(loaded, Mapping) or not isinstance(held, Mapping):
        return False
    of_optimizer = {"state", "param_groups"} <= held.keys()
    changed = False
    for key, value in loaded.items():
        put = _put_back_into if of_optimizer and key == "state" else put_back
        changed |= put(value, held.get(key))
    return changed


def _put_back_into(loaded: Any, held: Any) -> bool:
    if isinstance(loaded, Mapping) and isinstance(held, dict):
        pairs: Iterator[tuple[Any, Any]] = iter(loaded.items())
    elif isinstance(loaded, list) and isinstance(held, list) and len(loaded) == len(held):
        pairs = iter(enumerate(loaded))
    else:
        return False
    changed = False
    for key, value in pairs:
        here = held.get(key) if isinstance(held, dict) else held[key]
        if not isinstance(value, torch.Tensor):
            changed |= _put_back_into(value, here)
        elif isinstance(here, torch.Tensor) and here.dtype != value.dtype and here.shape == value.shape:
            held[key] = value.to(here.device)
            changed = True
    return changed


def differences(loaded: Any, held: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value of ``loaded`` that ``held`` does not have, or has with another value or dtype.

    Values that only ``held`` has are yielded too. Tensors are compared bit for bit, on the device of ``held``; those
    that are the same memory are not read.
    """
    if held is _ABSENT or loaded is _ABSENT:
        yield path
    elif isinstance(loaded, torch.Tensor) or isinstance(held, torch.Tensor):
        if not _same_tensor(loaded, held):
            yield path
    elif isinstance(loaded, Mapping) and isinstance(held, Mapping):
        for key in {**loaded, **held}:
            yield from differences(loaded.get(key, _ABSENT), held.get(key, _ABSENT), f"{path}[{key!r}]")
    elif isinstance(loaded, (list, tuple)) and isinstance(held, (list, tuple)) and len(loaded) == len(held):
        for index, (one, other) in enumerate(zip(loaded, held, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif not _same_value(loaded, held):
        yield path


def _same_tensor(loaded: Any, held: Any) -> bool:
    if not isinstance(loaded, torch.Tensor) or not isinstance(held, torch.Tensor) or loaded.shape != held.shape:
        return False
    loaded, held = ((one.to_local() if is_dtensor(one) else one).detach() for one in (loaded, held))
    if loaded.dtype != held.dtype or loaded.shape != held.shape:
        return False
    same_place = loaded.device == held.device and loaded.data_ptr() == held.data_ptr()
    if same_place and loaded.stride() == held.stride():
        return True
    one, other = _bytes_of(loaded.to(held.device)), _bytes_of(held)
    if not (one.numel() % _WORD or one.storage_offset() % _WORD or other.storage_offset() % _WORD):
        one, other = one.view(torch.int64), other.view(torch.int64)  # torch compares one element after the other
    return torch.equal(one, other)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _same_value(loaded: Any, held: Any) -> bool:
    if isinstance(loaded, np.ndarray) and isinstance(held, np.ndarray):
        return loaded.dtype == held.dtype and loaded.shape == held.shape and loaded.tobytes() == held.tobytes()
    if isinstance(loaded, BytesIO) and isinstance(held, BytesIO):
        return loaded.getvalue() == held.getvalue() and loaded.tell() == held.tell()
    return bool(loaded == held) or (loaded != loaded and held != held)  # noqa: PLR0124  NaN
