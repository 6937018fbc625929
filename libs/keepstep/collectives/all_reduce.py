"""All-reduce of 8-bit values.

Each chunk of rows is divided among the ranks. A rank sends the others their rows, quantized (all-to-all); adds what it
gets to its own rows in float32; quantizes the result; and sends it to all (all-gather). All ranks, also the owner of a
row, decode the same bytes, so all have the same result bit for bit. Two ranks send each other all rows instead, which
is as many bytes in half the rounds, and each adds both in the order of ranks. Three chunks are in work at a time: one
is encoded while two are on their way.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ReduceOp, Work

from keepstep.collectives.chunks import Chunk, chunks_of
from keepstep.collectives.composing import compose, on_stream, reduce_alone
from keepstep.collectives.row_exchange import ChunkReduction, Exchange, PairReduction, Reduction
from keepstep.process_group import ManagedProcessGroup
from keepstep.process_group.sequence import Begin
from keepstep.process_group.works import CompletedWork, JointWork
from keepstep.quantization.fused import factor_of
from keepstep.quantization.row_format import RowFormat, check_floats, default_format


def allreduce_quantized(
    tensors: list[torch.Tensor],
    opts: AllreduceOptions | ReduceOp | ReduceOp.RedOpType,
    process_group: dist.ProcessGroup,
    sync_stream: torch.cuda.Stream | None = None,
) -> Work:
    """Sum or average tensors in place over a process group, with a quarter of the bytes.

    The values are sent as 8 bits with one float32 scale for each 256: int8 in main memory, fp8 (e4m3) on an
    accelerator. Sums are computed in float32. All ranks get the same result bit for bit. A NaN or an infinity makes its
    row of 256 elements NaN.

    Args:
        tensors: dense float tensors on one device, of equal shapes and types in all ranks.
        opts: SUM or AVG, alone or in torch's options, whose timeout limits the whole operation. Without one, the
            timeout of the process group limits each of its collectives.
        process_group: any process group with ``alltoall_base``, or a ``ManagedProcessGroup``. With a group of torch
            itself the call returns when tensors in main memory are reduced.
        sync_stream: CUDA stream to use instead of the current one. It waits for the work that is queued on that.

    Returns:
        A Work, whose ``wait`` raises what went wrong. A group of one rank leaves the tensors as they are.

    Raises:
        ValueError: a tensor that is not a dense float tensor, or whose elements share memory; or another operation.
    """
    reduce_op, timeout = operation_of(opts)
    check_floats(tensors)
    if isinstance(process_group, ManagedProcessGroup):
        works = [process_group.allreduce_quantized(tensor, reduce_op) for tensor in tensors]
        return works[0] if len(works) == 1 else JointWork(works, tensors)
    factor = factor_of(reduce_op, process_group.size())
    with on_stream(sync_stream):
        return all_reduce(tensors, factor, process_group, timeout)


def operation_of(opts: Any) -> tuple[ReduceOp | ReduceOp.RedOpType, timedelta | None]:
    """Return the operation and the timeout of torch's options, or of a plain operation, which has no timeout."""
    timeout = getattr(opts, "timeout", timedelta(0))
    return getattr(opts, "reduceOp", opts), timeout if timeout > timedelta(0) else None


def all_reduce(
    tensors: list[torch.Tensor],
    factor: float,
    process_group: dist.ProcessGroup,
    timeout: timedelta | None,
    row_format: RowFormat | None = None,
) -> Work:
    """Start a quantized all-reduce.

    Args:
        tensors: dense float tensors on one device.
        factor: of each rank's contribution to the sum.
        process_group: of the ranks.
        timeout: of the whole operation; None: that of the process group, for each collective.
        row_format: default: that of the device.

    Raises:
        ValueError: elements of a tensor share memory.
    """
    for tensor in tensors:
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"elements of a tensor of shape {tuple(tensor.shape)} share memory (strides {tensor.stride()}): they "
                "cannot be written; reduce tensor.contiguous()"
            )
    ranks = process_group.size()
    if not any(tensor.numel() for tensor in tensors):
        return CompletedWork(tensors)
    if ranks == 1:
        return reduce_alone(process_group, tensors)
    chosen = row_format or default_format(tensors[0].device)
    exchange = Exchange(process_group.rank(), ranks, timeout)
    return compose(process_group, partial(_reduce, tensors, exchange, chosen, factor), tensors)


def _reduce(
    tensors: list[torch.Tensor], exchange: Exchange, row_format: RowFormat, factor: float, begin: Begin
) -> None:
    wholes = [tensor.detach().contiguous() for tensor in tensors]
    kind = PairReduction if exchange.ranks == 2 else ChunkReduction
    reducing: Reduction | None = None
    gathering: Reduction | None = None
    for parts in [*chunks_of([whole.view(-1) for whole in wholes]), None, None]:
        sending = None if parts is None else kind(Chunk(parts), exchange, row_format, factor, begin)
        if reducing is not None:
            reducing.reduce()
        if gathering is not None:
            gathering.finish()
        reducing, gathering = sending, reducing
    for tensor, whole in zip(tensors, wholes, strict=True):
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)
