"""Conversion of values that are not tensors to msgpack values, and back.

None, bool, float, str, bytes and integers of 64 bits are stored as they are. Every other value is stored as a list that
starts with the name of its type.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import torch

from keepstep.state.errors import UnsupportedValue
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import glimpse
from keepstep_mesh.protocol.state_content import ITEM_BYTES, NUMPY_DTYPE

_INT_RANGE = range(-(1 << 63), 1 << 64)
_MAX_INT_BYTES = 1 << 16

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
"""The supported dtypes of tensors, by their names in a manifest."""

_QUANTIZED_DTYPES = {
    name: getattr(torch, name) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
}
_TORCH_NAMES: dict[str, tuple[type, dict[str, Any]]] = {
    "dtype": (torch.dtype, TORCH_DTYPES | _QUANTIZED_DTYPES),
    "qscheme": (
        type(torch.per_tensor_affine),
        {
            name: getattr(torch, name)
            for name in (
                *("per_tensor_affine", "per_tensor_symmetric"),
                *("per_channel_affine", "per_channel_symmetric", "per_channel_affine_float_qparams"),
            )
        },
    ),
    "layout": (
        torch.layout,
        {
            name: getattr(torch, name)
            for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
        },
    ),
    "memory_format": (
        torch.memory_format,
        {
            name: getattr(torch, name)
            for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
        },
    ),
}
"""Values that torch has a name for: their type, and the values by name."""

TORCH_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
WITHOUT_COPY = frozenset(TORCH_DTYPES[name] for name in TORCH_DTYPES if name.lstrip("uint") in "1234567")
"""Integers of less than a byte: torch has no kernel that copies them."""
BITS = frozenset(dtype for name, dtype in TORCH_DTYPES.items() if name.startswith("bits"))
"""Dtypes without arithmetic."""


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Do ``target.copy_(source)``, also for dtypes that torch does not copy. Return ``target``."""
    if source.dtype in WITHOUT_COPY and target.dtype is source.dtype:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
        return target
    return target.copy_(source)


def numpy_dtype(name: Any) -> np.dtype[Any]:
    """Return the dtype whose ``dtype.str`` is ``name``. Raises ``ManifestError``, also for dtypes with objects."""
    if type(name) is not str or not NUMPY_DTYPE.fullmatch(name):
        raise ManifestError(f"unsupported numpy dtype {glimpse(name)}")
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:
        raise ManifestError(f"invalid numpy dtype {name!r}: {error}") from error


def numpy_dtype_name(dtype: np.dtype[Any], path: str) -> str:
    """Return the name of ``dtype`` in a manifest. Raises ``UnsupportedValue`` that names ``path``."""
    if not NUMPY_DTYPE.fullmatch(dtype.str):
        raise UnsupportedValue(f"{path} has numpy dtype {dtype}: expected numbers, strings or times, not objects")
    return dtype.str


def _big_int(value: int) -> list[Any]:
    return ["int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _zone_is_fixed(value: datetime | time) -> bool:
    return value.tzinfo is None or type(value.tzinfo) is timezone


def encode_leaf(value: Any, path: str) -> Any:
    """Return ``value`` as a msgpack value. Raises ``UnsupportedValue`` that names ``path`` for any other type."""
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedValue(f"{path} is a string that UTF-8 cannot encode: {error}") from error
        return value
    if kind is bytes:
        return value
    if kind is int:
        if value in _INT_RANGE:
            return value
        if value.bit_length() // 8 >= _MAX_INT_BYTES:
            raise UnsupportedValue(f"{path} is an integer of {value.bit_length()} bits (limit {_MAX_INT_BYTES * 8})")
        return _big_int(value)
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is torch.Size:
        return ["size", *value]
    for node, (named, values) in _TORCH_NAMES.items():
        if kind is named and value in values.values():
            return [node, next(name for name, one in values.items() if one == value)]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind in (datetime, time) and _zone_is_fixed(value):
        name = () if value.tzinfo is None else value.tzinfo.__getinitargs__()[1:]  # of the zone, if it has its own
        return [kind.__name__, value.isoformat(), value.fold, *name]
    if kind is date:
        return ["date", value.isoformat()]
    if isinstance(value, np.generic):
        array = np.asarray(value)
        return ["scalar", numpy_dtype_name(array.dtype, path), array.tobytes()]
    raise UnsupportedValue(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store: convert it to tensors, "
        f"numbers, strings, dicts, lists or tuples (values are never pickled)"
    )


def _complex(real: float, imag: float) -> complex:
    return complex(float(real), float(imag))


def _scalar(name: str, raw: bytes) -> Any:
    dtype = numpy_dtype(name)
    if dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes, expected {dtype.itemsize}")
    return np.frombuffer(raw, dtype)[0]


def _with_zone(value: Any, fold: int, name: str | None = None) -> Any:
    zone = value.tzinfo if name is None else timezone(value.utcoffset(), name)
    return value.replace(fold=fold, tzinfo=zone)


def _integer(raw: bytes) -> int:
    if len(raw) > _MAX_INT_BYTES:
        raise ValueError(f"integer too long: {len(raw)} bytes (limit {_MAX_INT_BYTES})")
    return int.from_bytes(raw, "little", signed=True)


_DECODERS: dict[str, Callable[..., Any]] = {
    "int": _integer,
    "complex": _complex,
    "size": lambda *sizes: torch.Size(sizes),
    **{node: values.__getitem__ for node, (_, values) in _TORCH_NAMES.items()},
    "device": torch.device,
    "timedelta": timedelta,
    "datetime": lambda text, *more: _with_zone(datetime.fromisoformat(text), *more),
    "time": lambda text, *more: _with_zone(time.fromisoformat(text), *more),
    "date": date.fromisoformat,
    "scalar": _scalar,
}


def decode_leaf(node: Any, path: str) -> Any:
    """Return the value of a node that ``encode_leaf`` returned. Raises ``ManifestError`` for any other node."""
    if node is None or type(node) in (bool, int, float, str, bytes):
        return node
    if type(node) is not list or not node or type(node[0]) is not str or node[0] not in _DECODERS:
        kind = glimpse(node[0]) if type(node) is list and node else glimpse(node)
        raise ManifestError(f"{path} is not a value of this format: {kind}")
    try:
        return _DECODERS[node[0]](*node[1:])
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError, AttributeError) as error:
        raise ManifestError(f"{path} is an invalid {node[0]}: {error}") from error
