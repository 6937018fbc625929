"""Quantize, reduce, and dequantize whole lists of tensors, in the layout of one buffer for an all-to-all.

The buffer has one piece for each rank, all of the same size: the slices of all tensors that this rank reduces. A tensor
is cut along its first dimension, as ``get_padded_sizes`` describes, and each slice begins a new row of the format.
"""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from keepstep.quantization.row_format import FP8, ROW, check_floats
from keepstep.quantization.slices import Slices


def fused_quantize_into_fp8(inputs: list[torch.Tensor], all_reduce_group_size: int) -> torch.Tensor:
    """Quantize tensors to fp8 (e4m3) with one scale for each 256 elements.

    CUDA tensors run as Triton kernels, others as operations of torch with the same results. A row with a NaN or an
    infinity becomes NaN.

    Args:
        inputs: float tensors of any shapes on one device.
        all_reduce_group_size: number of ranks that share the reduction.

    Returns:
        A uint8 buffer of ``all_reduce_group_size`` pieces of equal size; piece ``i`` is for rank ``i``.

    Raises:
        ValueError: no tensors, a tensor that is not a dense float tensor, or an invalid group size.
    """
    slices = Slices.of(inputs, all_reduce_group_size)
    buffer = torch.empty(slices.ranks * FP8.piece_bytes(slices.rows), dtype=torch.uint8, device=inputs[0].device)
    for rank, piece in enumerate(slices.pieces(buffer, FP8)):
        FP8.encode(slices.gather(inputs, rank), *piece)
    return buffer


def fused_dequantize_from_fp8(inputs: list[torch.Tensor], output: torch.Tensor, all_reduce_group_size: int) -> None:
    """Write the tensors back that ``fused_quantize_into_fp8`` quantized.

    Args:
        inputs: the tensors to write, with the shapes of those that were quantized.
        output: the buffer to read.
        all_reduce_group_size: number of ranks that share the reduction.

    Raises:
        ValueError: as ``fused_quantize_into_fp8``, or the buffer has another size.
    """
    slices = Slices.of(inputs, all_reduce_group_size)
    for rank, (scales, values) in enumerate(slices.pieces(output, FP8)):
        rows = torch.empty(slices.rows, ROW, device=output.device)
        FP8.decode(scales, values, rows)
        slices.scatter(rows, inputs, rank)


def fused_reduce_fp8(
    inputs: list[torch.Tensor],
    output: torch.Tensor,
    all_reduce_group_size: int,
    all_reduce_rank: int,
    reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM,
) -> None:
    """Reduce the pieces that all ranks sent to this one, in float32, and quantize the result into its own piece.

    Args:
        inputs: tensors with the shapes of those that were quantized.
        output: the buffer of an all-to-all: piece ``i`` is from rank ``i``. Piece ``all_reduce_rank`` gets the result.
        all_reduce_group_size: number of ranks that share the reduction.
        all_reduce_rank: rank of this process among them.
        reduce_op: SUM or AVG.

    Raises:
        ValueError: as ``fused_dequantize_from_fp8``, or the rank or the operation is invalid.
    """
    if not 0 <= all_reduce_rank < all_reduce_group_size:
        raise ValueError(f"invalid all_reduce_rank {all_reduce_rank}: expected 0 to {all_reduce_group_size - 1}")
    factor = factor_of(reduce_op, all_reduce_group_size)
    slices = Slices.of(inputs, all_reduce_group_size)
    total = torch.zeros(slices.rows, ROW, device=output.device)
    pieces = list(slices.pieces(output, FP8))
    for scales, values in pieces:
        FP8.add(scales, values, total, factor)
    FP8.encode(total, *pieces[all_reduce_rank])


def factor_of(reduce_op: ReduceOp | ReduceOp.RedOpType, size: int) -> float:
    """Return the factor of each rank's contribution to a sum or an average. ValueError: another operation."""
    if reduce_op == ReduceOp.SUM:
        return 1.0
    if reduce_op == ReduceOp.AVG:
        return 1.0 / size
    raise ValueError(f"invalid operation {reduce_op} of a quantized reduction: expected ReduceOp.SUM or ReduceOp.AVG")


def check_quantizable(tensors: list[torch.Tensor], reduce_op: ReduceOp | ReduceOp.RedOpType) -> None:
    """Raise ValueError unless a quantized reduction of the tensors is possible."""
    check_floats(tensors)
    factor_of(reduce_op, 1)
