"""How a list of tensors is cut among the ranks of a reduction: along the first dimension of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from keepstep.quantization.row_format import ROW, RowFormat, check_floats, rows_of


def padded_sizes(tensors: list[torch.Tensor], world_size: int) -> list[torch.Size]:
    """Return the shapes with the first dimension rounded up to a multiple of ``world_size``; see ``collectives``."""
    if world_size < 1:
        raise ValueError(f"invalid number of ranks {world_size}: expected at least 1")
    sizes = []
    for tensor in tensors:
        first, *others = tensor.shape or (1,)
        sizes.append(torch.Size((-(-first // world_size) * world_size, *(others or (1,)))))
    return sizes


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of each rank. A slice begins a new row; its last row is padded with zeros."""

    elements: tuple[int, ...]
    """Elements of each tensor's slice, padding included."""
    ranks: int

    @classmethod
    def of(cls, tensors: list[torch.Tensor], ranks: int) -> Slices:
        """Return the slices of ``tensors``.

        Raises:
            ValueError: no tensors, a tensor that cannot be quantized, or an invalid number of ranks.
        """
        if not tensors:
            raise ValueError("no tensors to quantize: expected a list of at least one tensor")
        check_floats(tensors)
        return cls(tuple(size.numel() // ranks for size in padded_sizes(tensors, ranks)), ranks)

    @property
    def rows(self) -> int:
        """Number of rows of each rank."""
        return sum(map(rows_of, self.elements))

    def pieces(self, buffer: torch.Tensor, row_format: RowFormat) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the scales and values of each rank's piece in ``buffer``.

        Raises:
            ValueError: the buffer has another size.
        """
        size = row_format.piece_bytes(self.rows)
        if buffer.dtype != torch.uint8 or buffer.shape != (self.ranks * size,):
            raise ValueError(
                f"invalid buffer of shape {tuple(buffer.shape)} and {buffer.dtype}: expected {self.ranks * size} uint8"
            )
        for piece in buffer.view(self.ranks, size):
            yield row_format.parts(piece, self.rows)

    def gather(self, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
        """Return the slices of ``rank`` as float32 rows of shape (rows, ROW)."""
        rows = torch.zeros(self.rows, ROW, device=tensors[0].device)
        for tensor, place in zip(tensors, self._places(rows), strict=True):
            part = self._slice(tensor.detach().reshape(-1), rank, place.numel())
            place[: part.numel()] = part
        return rows

    def scatter(self, rows: torch.Tensor, tensors: list[torch.Tensor], rank: int) -> None:
        """Write rows into the slices of ``rank``."""
        for tensor, place in zip(tensors, self._places(rows), strict=True):
            whole = tensor.detach()
            flat = whole.reshape(-1)  # a copy, unless the tensor is contiguous
            part = self._slice(flat, rank, place.numel())
            part.copy_(place[: part.numel()])
            if flat.data_ptr() != whole.data_ptr():
                whole.copy_(flat.view_as(whole))

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the slices in ``rows`` one after the other, without the padding of rows."""
        return torch.cat(list(self._places(rows)))

    def _places(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the elements of each tensor's slice in ``rows``."""
        flat, begin = rows.view(-1), 0
        for count in self.elements:
            yield flat[begin : begin + count]
            begin += rows_of(count) * ROW

    def _slice(self, flat: torch.Tensor, rank: int, count: int) -> torch.Tensor:
        return flat[min(rank * count, flat.numel()) : (rank + 1) * count]
