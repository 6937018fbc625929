"""Tensors as the rows of a codec: float32 rows of equal width, in blocks that one thread handles.

Each tensor begins a new row, and its last row is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_BLOCK_ELEMENTS = 28672
"""Elements that are handled at once in main memory, a multiple of all widths: 112 KiB of float32, which stay in a
core's cache. For 32768 elements, torch starts threads, which compete with those of the training thread.
"""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The places of tensors in one tensor of rows."""

    shapes: tuple[torch.Size, ...]
    width: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], width: int) -> RowLayout:
        """Return the layout of ``tensors`` in rows of ``width`` elements."""
        return cls(tuple(tensor.shape for tensor in tensors), width)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(-(-shape.numel() // self.width) for shape in self.shapes)

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a copy of ``tensors`` as float32 rows of shape (rows, width)."""
        rows = torch.empty(self.rows, self.width, device=tensors[0].device)
        for view, tensor in zip(self.views(rows), tensors, strict=True):
            _copy(tensor.detach(), view)
        self.clear_padding(rows)
        return rows

    def write(self, rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy ``rows`` into ``tensors``."""
        for view, tensor in zip(self.views(rows), tensors, strict=True):
            _copy(view, tensor.detach())

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return each tensor as a view of its rows."""
        flat = rows.view(-1)
        return [flat[begin : begin + shape.numel()].view(shape) for begin, shape in self._places()]

    def clear_padding(self, rows: torch.Tensor) -> None:
        """Set the elements of ``rows`` that are in no tensor to 0."""
        flat = rows.view(-1)
        for begin, shape in self._places():
            end = begin + shape.numel()
            flat[end : end + -shape.numel() % self.width].zero_()

    def _places(self) -> Iterator[tuple[int, torch.Size]]:
        """Yield the first element of each tensor in the rows, and its shape."""
        begin = 0
        for shape in self.shapes:
            yield begin, shape
            begin += -(-shape.numel() // self.width) * self.width


def blocks(rows: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield blocks of tensors with equally many rows; on an accelerator, all rows at once."""
    size = _BLOCK_ELEMENTS // rows.shape[1] if rows.is_cpu else rows.shape[0]
    if rows.shape[0]:
        yield from zip(*(torch.split(one, size) for one in (rows, *others)), strict=True)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_cpu and target.is_cpu and source.is_contiguous() and target.is_contiguous():
        for part, copy in zip(*(torch.split(one.view(-1), _BLOCK_ELEMENTS) for one in (source, target)), strict=True):
            copy.copy_(part)
    else:
        target.copy_(source)
