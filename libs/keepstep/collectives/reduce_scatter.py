"""Reduce-scatter of 8-bit values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, ReduceScatterOptions, Work

from keepstep.collectives.all_reduce import operation_of
from keepstep.collectives.composing import compose, on_stream, reduce_alone
from keepstep.collectives.row_exchange import Exchange
from keepstep.process_group import ManagedProcessGroup, ProcessGroupError
from keepstep.process_group.sequence import Begin
from keepstep.quantization.fused import factor_of
from keepstep.quantization.row_format import default_format
from keepstep.quantization.slices import Slices


def reduce_scatter_quantized(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    opts: ReduceScatterOptions | ReduceOp | ReduceOp.RedOpType,
    process_group: dist.ProcessGroup,
    sync_stream: torch.cuda.Stream | None = None,
) -> Work:
    """Sum or average tensors over a process group, with a quarter of the bytes, and leave to each rank its share.

    See ``allreduce_quantized`` for the format. The result is not quantized again.

    Args:
        output: the share of this rank, as ``allocate_reduce_scatter_output`` allocates it.
        inputs: dense float tensors on one device, of equal shapes and types in all ranks. They stay as they are.
        opts: as of ``allreduce_quantized``.
        process_group: any process group with ``alltoall_base``.
        sync_stream: as of ``allreduce_quantized``.

    Returns:
        A Work, whose ``wait`` raises what went wrong.

    Raises:
        ValueError: an input that is not a dense float tensor, another operation, or an output of another size.
        ProcessGroupError: a ``ManagedProcessGroup``, whose Manager could not report errors.
    """
    if isinstance(process_group, ManagedProcessGroup):
        raise ProcessGroupError(
            "a quantized reduce-scatter is not supported by ManagedProcessGroup; use allreduce_quantized"
        )
    reduce_op, timeout = operation_of(opts)
    rank, ranks = process_group.rank(), process_group.size()
    factor = factor_of(reduce_op, ranks)
    slices = Slices.of(inputs, ranks)
    if output.dim() != 1 or output.numel() != sum(slices.elements) or not output.is_floating_point():
        raise ValueError(
            f"invalid output of shape {tuple(output.shape)} and {output.dtype}: expected {sum(slices.elements)} floats "
            "in one dimension, as allocate_reduce_scatter_output allocates"
        )
    row_format = default_format(inputs[0].device)
    exchange = Exchange(rank, ranks, timeout)

    def reduce(begin: Begin) -> None:
        total = slices.gather(inputs, rank).mul_(factor)
        others = [one for one in range(ranks) if one != rank]
        if others and slices.rows:
            shape = (len(others), row_format.piece_bytes(slices.rows))
            outgoing, incoming = (torch.empty(shape, dtype=torch.uint8, device=output.device) for _ in range(2))
            for piece, peer in zip(outgoing, others, strict=True):
                row_format.encode(slices.gather(inputs, peer), *row_format.parts(piece, slices.rows))
            exchange.send_pieces(begin, outgoing.view(-1), incoming.view(-1)).wait()
            for piece in incoming:
                row_format.add(*row_format.parts(piece, slices.rows), total, factor)
        output.detach().copy_(slices.joined(total))

    if ranks == 1:
        reduce_alone(process_group, [output]).wait()
    with on_stream(sync_stream):
        return compose(process_group, reduce, [output])
