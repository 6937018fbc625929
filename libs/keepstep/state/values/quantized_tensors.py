"""Tensors of torch's quantized dtypes, which quantized modules have: integers, and the scales to read them by."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.state.errors import UnsupportedValue
from keepstep_mesh.errors import ManifestError

_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)


def quantized_parts(tensor: torch.Tensor, path: str) -> list[Any]:
    """Return dtype, integers, scales, zero points, and the axis of the channels, or None for one scale.

    Raises:
        UnsupportedValue: the tensor is packed, or quantized in another way; the error names ``path``.
    """
    tensor, scheme = tensor.detach(), _scheme(tensor)
    if tensor.dtype not in _INTEGERS or scheme not in (*_PER_TENSOR, *_PER_CHANNEL):
        raise UnsupportedValue(
            f"{path} is a tensor of {tensor.dtype}, {scheme}: expected {', '.join(map(str, _INTEGERS))} with an affine "
            f"scheme, or a tensor that is not quantized"
        )
    if scheme in _PER_TENSOR:
        return [tensor.dtype, tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point(), None]
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [tensor.dtype, tensor.int_repr(), scales, zeros, tensor.q_per_channel_axis()]


def _scheme(tensor: torch.Tensor) -> torch.qscheme | None:
    try:
        return tensor.qscheme()
    except RuntimeError:  # its bytes were reinterpreted
        return None


def quantized_tensor(parts: list[Any], path: str) -> torch.Tensor:
    """Inverse of ``quantized_parts``. Raises ``ManifestError``."""
    try:
        dtype, integers, scales, zeros, axis = parts
        if integers.dtype is not _INTEGERS[dtype]:
            raise ManifestError(f"{path} has integers of {integers.dtype} for {dtype}")
        if axis is None:
            return torch._make_per_tensor_quantized_tensor(integers, scales, zeros)  # noqa: SLF001  as torch.load does
        return torch._make_per_channel_quantized_tensor(integers, scales, zeros, axis)  # noqa: SLF001
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise ManifestError(f"{path} is an invalid quantized tensor: {error}") from error
