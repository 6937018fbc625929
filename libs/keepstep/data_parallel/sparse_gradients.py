"""Average sparse gradients over the groups: of ``nn.Embedding(sparse=True)``, and of other sparse COO tensors.

Each group has its own number of elements. So the groups first sum a table of these numbers, each its own column, and
then the concatenated elements of all groups, each its own segment. All groups thus hold the same elements and add them
in the order of the groups, so their results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from keepstep.manager import Manager


@torch.no_grad()
def average_sparse(manager: Manager, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Replace the gradients by their averages. A gradient that no group has stays None.

    Args:
        manager: of this replica group; its step is open.
        parameters: with their names; on one device, in the same order in all groups.

    Raises:
        RuntimeError: a gradient is not sparse.
    """
    try:
        rank, world = manager.participating_rank(), manager.num_participants()
    except (Exception, SystemExit) as error:  # noqa: BLE001  no quorum
        manager.report_error(RuntimeError(f"no quorum: {error}"))
        return
    own = [None if one.grad is None else _coalesced(name, one.grad) for name, one in parameters]
    table = torch.zeros(len(own), world, dtype=torch.int64)
    if rank is not None:
        table[:, rank] = torch.tensor([-1 if one is None else one._nnz() for one in own]) + 1  # noqa: SLF001
    table = table.to(parameters[0][1].device)
    if not manager.allreduce(table, reduce_op=ReduceOp.SUM).wait():
        return
    pending = []
    for (_, parameter), gradient, row in zip(parameters, own, table.tolist(), strict=True):
        if not any(row):
            continue
        counts = [max(0, one - 1) for one in row]
        positions = torch.zeros(sum(counts), dtype=torch.int64, device=parameter.device)
        values = torch.zeros(sum(counts), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        if rank is not None and gradient is not None:
            begin = sum(counts[:rank])
            positions[begin : begin + counts[rank]] = gradient.indices()[0]
            values[begin : begin + counts[rank]] = gradient.values() / world  # as torch's DDP: divided before the sum
        if positions.numel():
            works = [manager.allreduce(one, reduce_op=ReduceOp.SUM) for one in (positions, values)]
        else:
            works = []
        pending.append((parameter, works, positions, values, counts))
    for parameter, works, positions, values, counts in pending:
        if all(work.wait() for work in works):
            parameter.grad = _sum(parameter, positions, values, counts)


def _coalesced(name: str, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise RuntimeError(
            f"the gradient of parameter {name!r} has the layout {gradient.layout}, and its module declares sparse "
            f"gradients of whole rows: use the weight of nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True) in "
            f"that module only, or build the module with sparse=False"
        )
    return gradient.coalesce()


def _sum(parameter: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Add the segments of the groups, in their order. Within a segment each position occurs once."""
    rows, places = torch.unique(positions, return_inverse=True)
    total = torch.zeros(len(rows), *values.shape[1:], dtype=values.dtype, device=values.device)
    for segment, place in zip(*(torch.split(one, list(counts)) for one in (values, places)), strict=True):
        total.index_add_(0, place, segment)
    return torch.sparse_coo_tensor(rows[None], total, parameter.shape, is_coalesced=True)
