"""Rows of 8-bit values with one float32 scale each: the bytes that quantized collectives send.

A row has ``ROW`` elements. Its scale is its largest absolute value divided by the largest value of the format, so an
element is ``value * scale``. A piece of ``n`` rows is ``4 n`` bytes of scales, then ``ROW * n`` bytes of values: 25.4 %
of float32. A row with a NaN or an infinity has the scale NaN, so every element of it decodes to NaN.

Decoding multiplies once and adds without a fused multiply-add, so equal bytes give equal numbers on every processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ROW = 256
"""Elements of a row."""
SCALE_BYTES = 4
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of tensors that can be quantized."""

_BLOCK_ROWS = 120
"""Rows that are handled at once in main memory: 120 KiB of float32, which stay in a core's cache. For 32768 elements,
torch starts threads, which compete with those of the training thread.
"""
_KERNELS_FROM = (8, 9)
"""Compute capability from which Triton has e4m3."""
_ROUNDING = 1.5 * 2.0**23
"""Adding and subtracting it rounds a float32 of up to 2^22 to the nearest integer, half to even."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class RowFormat:
    """An 8-bit format of values that share the scale of their row."""

    name: str
    dtype: torch.dtype
    largest: float
    """Largest value that a row uses."""

    def piece_bytes(self, rows: int) -> int:
        """Return the size of a piece of ``rows`` rows."""
        return rows * (SCALE_BYTES + ROW)

    def parts(self, piece: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a piece: float32 scales of shape (rows,), and values of shape (rows, ROW)."""
        split = SCALE_BYTES * rows
        if not rows:
            piece = piece.new_empty(0)  # an empty slice may have an offset that no float32 may have
        return piece[:split].view(torch.float32), piece[split:].view(self.dtype).view(rows, ROW)

    def encode(self, rows: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of a float tensor of shape (n, ROW) into the first n ``scales`` and ``values``."""
        count = rows.shape[0]
        scales, values = scales[:count], values[:count]
        if (kernels := _kernels(rows)) is not None:
            kernels.encode(rows, scales, values, self.largest)
            return
        for (block, scale), scratch in _blocks(rows, scales):
            torch.amax(torch.abs(_as_float32(block), out=scratch), dim=1, out=scale)  # a tenth of vector_norm's time
        scales.mul_(1 / self.largest).clamp_min_(_SMALLEST_SCALE)
        scales.add_(scales - scales)  # infinity becomes NaN
        for (block, inverse, value), scratch in _blocks(rows, scales.reciprocal().unsqueeze_(1), values):
            torch.mul(_as_float32(block), inverse, out=scratch)
            if not self.dtype.is_floating_point:
                scratch.add_(_ROUNDING).sub_(_ROUNDING)  # round_() starts threads for 2048 elements
            value.copy_(scratch)

    def decode(self, scales: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the first n scales and values into a float tensor of shape (n, ROW)."""
        count = rows.shape[0]
        scales, values = scales[:count], values[:count]
        if (kernels := _kernels(rows)) is not None:
            kernels.decode(scales, values, rows)
            return
        for (block, scale, value), scratch in _blocks(rows, scales.unsqueeze(1), values):
            target = block if block.dtype is torch.float32 else scratch
            target.copy_(value).mul_(scale)
            if target is scratch:
                block.copy_(scratch)

    def total(self, pieces: list[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor, factor: float) -> None:
        """Write ``factor`` times the sum of the first n scales and values of all pieces into rows of shape (n, ROW).

        Computed in float32, in the order of the pieces.
        """
        count = rows.shape[0]
        parts = [part for scales, values in pieces for part in (scales[:count].unsqueeze(1) * factor, values[:count])]
        if (kernels := _kernels(rows)) is not None:
            total = torch.empty(rows.shape, device=rows.device)
            kernels.decode(parts[0], parts[1], total)  # adding it to zeros would make a zero of -0.0
            for scale, value in zip(parts[2::2], parts[3::2], strict=True):
                kernels.add(scale, value, total)
            rows.copy_(total)
            return
        for (block, *of_block), scratch in _blocks(rows, *parts):
            total = block if block.dtype is torch.float32 else torch.empty_like(scratch)
            total.copy_(of_block[1]).mul_(of_block[0])
            for scale, value in zip(of_block[2::2], of_block[3::2], strict=True):
                total.add_(scratch.copy_(value).mul_(scale))
            if total is not block:
                block.copy_(total)

    def add(self, scales: torch.Tensor, values: torch.Tensor, total: torch.Tensor, factor: float) -> None:
        """Add ``factor`` times the first n scales and values to a float32 tensor of shape (n, ROW)."""
        count = total.shape[0]
        scales, values = scales[:count] * factor, values[:count]
        if (kernels := _kernels(total)) is not None:
            kernels.add(scales, values, total)
            return
        for (block, scale, value), scratch in _blocks(total, scales.unsqueeze(1), values):
            block.add_(scratch.copy_(value).mul_(scale))


INT8 = RowFormat("int8", torch.int8, 127.0)
FP8 = RowFormat("fp8", torch.float8_e4m3fn, 448.0)
FORMATS = {one.name: one for one in (INT8, FP8)}


def default_format(device: torch.device) -> RowFormat:
    """Return the format of quantized collectives on ``device``: int8 in main memory, fp8 on an accelerator."""
    return INT8 if device.type == "cpu" else FP8


def check_floats(tensors: list[torch.Tensor]) -> None:
    """Raise ValueError for a tensor that cannot be quantized."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS or tensor.layout is not torch.strided:
            raise ValueError(
                f"cannot quantize a tensor of {tensor.dtype} and {tensor.layout}: expected a dense tensor of float16, "
                "bfloat16, float32, or float64; reduce it without quantization"
            )


def rows_of(elements: int) -> int:
    """Return the number of rows that hold so many elements."""
    return -(-elements // ROW)


def multiplied(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``factor`` times the rows as float32."""
    total = torch.empty(rows.shape, device=rows.device)
    for (block, result), _ in _blocks(rows, total):
        torch.mul(_as_float32(block), factor, out=result)
    return total


def _as_float32(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dtype is torch.float32 else rows.float()


def _blocks(rows: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Yield blocks of all tensors, and float32 scratch memory for one; on an accelerator, all rows at once."""
    size = min(_BLOCK_ROWS, rows.shape[0]) if rows.is_cpu else rows.shape[0]
    if size:
        memory = torch.empty(size, ROW, device=rows.device)
        for blocks in zip(*(torch.split(one, size) for one in (rows, *others)), strict=True):
            yield blocks, memory if blocks[0].shape[0] == size else memory[: blocks[0].shape[0]]


@cache
def _triton_kernels() -> Any:
    try:
        from keepstep.quantization import triton_kernels  # noqa: PLC0415  Triton is on machines with a GPU only
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return triton_kernels


def _kernels(tensor: torch.Tensor) -> Any:
    """Return the kernels for the tensor's device; None: operations of torch compute the same."""
    if not (tensor.is_cuda and tensor.is_contiguous()) or torch.version.cuda is None:
        return None
    return _triton_kernels() if torch.cuda.get_device_capability(tensor.device) >= _KERNELS_FROM else None
