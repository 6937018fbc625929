"""The arithmetic of ``row_format`` as Triton kernels, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
_EXPONENT = tl.constexpr(0x7F800000)
"""Exponent bits of a float32. All are set in a NaN and in an infinity."""
OPTIONS = {"enable_fp_fusion": False}
"""For Triton's compiler, which makes a fused multiply-add of ``_add`` otherwise: torch's operations round twice."""


@triton.jit  # type: ignore[untyped-decorator]
def _encode(rows, scales, values, largest, row_elements: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    place = row * row_elements + tl.arange(0, row_elements)
    x = tl.load(rows + place).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    broken = tl.max(((bits & _EXPONENT) == _EXPONENT).to(tl.int32), axis=0)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / largest, _SMALLEST_SCALE)
    scale = tl.where(broken == 1, float("nan"), scale)
    tl.store(scales + row, scale)
    scaled = tl.where(broken == 1, 0.0, x / scale)
    tl.store(values + place, tl.clamp(scaled, -largest, largest).to(values.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _decode(scales, values, rows, row_elements: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    place = row * row_elements + tl.arange(0, row_elements)
    x = tl.load(values + place).to(tl.float32) * tl.load(scales + row)
    tl.store(rows + place, x.to(rows.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _add(scales, values, total, row_elements: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    place = row * row_elements + tl.arange(0, row_elements)
    x = tl.load(values + place).to(tl.float32) * tl.load(scales + row)
    tl.store(total + place, tl.load(total + place) + x)


def encode(rows: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, largest: float) -> None:
    """See ``RowFormat.encode``. ``values`` is float8_e4m3fn."""
    _launch(_encode, rows.shape, rows, scales, values, largest)


def decode(scales: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
    """See ``RowFormat.decode``."""
    _launch(_decode, rows.shape, scales, values, rows)


def add(scales: torch.Tensor, values: torch.Tensor, total: torch.Tensor) -> None:
    """See ``RowFormat.add``; ``scales`` have the factor."""
    _launch(_add, total.shape, scales, values, total)


def _launch(kernel, shape: torch.Size, *args: torch.Tensor | float) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    count, row_elements = shape
    if count:
        with torch.cuda.device(args[0].device):  # type: ignore[union-attr]  # Triton starts them on the current one
            kernel[(count,)](*args, row_elements=row_elements, **OPTIONS)
