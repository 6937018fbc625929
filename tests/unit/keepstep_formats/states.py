"""States with every kind of value, and their comparison."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepstep_formats.dcp_directory import DcpDirectory

BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def read_directory(path: Path) -> dict[str, Any]:
    """Return the state of a directory of DCP, with all tensors."""
    directory = DcpDirectory(path)

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        if isinstance(value, torch.Tensor) and value.data_ptr() in directory.unread:
            return directory.unread[value.data_ptr()]()
        return value

    return filled(directory.state)


def training_state() -> dict[str, Any]:
    """A model, its optimizer after a step, and other values."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tensors": every_dtype(),
        "list": [{"x": torch.arange(3)}, torch.tensor(7.5)],
        "plain": [1, 2.5, None, True, "text", b"bytes", (1, "x"), 1 << 80],
        "array": np.arange(6, dtype="<f4").reshape(2, 3),
        "scalar": np.float64(0.25),
        "when": datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
    }


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of each dtype that safetensors has, and odd shapes."""
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64"
    names += " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    found = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names.split()}
    found["float4_e2m1fn_x2"] = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
    return found | {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are bit-equal. Keys of dicts are compared as DCP has them: as strings."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and _bits(one).equal(_bits(other))
    if isinstance(one, dict):
        left, right = ({str(key): item for key, item in each.items()} for each in (one, other))
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BYTES[tensor.itemsize])
