"""Tensors as rows for quantization, in chunks of a limited size.

Each tensor begins a new row. A chunk is a view of a tensor's memory where it can be, otherwise a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from keepstep.quantization.row_format import ROW, rows_of

CHUNK_ROWS = 2048
"""Rows of a chunk: 2 MiB of float32. One chunk is encoded while another is on its way."""


class Chunk:
    """Some rows of a list of tensors. ``parts``: pieces of their memory of one dimension, in order."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts = parts
        self._copied = len(parts) > 1 or parts[0].numel() % ROW != 0
        if not self._copied:
            self.rows = parts[0].view(-1, ROW)
            return
        self.rows = torch.zeros(sum(rows_of(part.numel()) for part in parts), ROW, device=parts[0].device)
        for part, place in self._places():
            place.copy_(part)

    def write_back(self) -> None:
        """Write changed rows to the tensors, where they are a copy."""
        if self._copied:
            for part, place in self._places():
                part.copy_(place)

    def _places(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        flat, begin = self.rows.view(-1), 0
        for part in self._parts:
            yield part, flat[begin : begin + part.numel()]
            begin += rows_of(part.numel()) * ROW


def chunks_of(flats: list[torch.Tensor], limit: int = CHUNK_ROWS) -> list[list[torch.Tensor]]:
    """Divide contiguous tensors of one dimension into the parts of chunks of at most ``limit`` rows each."""
    chunks: list[list[torch.Tensor]] = []
    room = 0
    for flat in flats:
        begin = 0
        while begin < flat.numel():
            if not room:
                chunks.append([])
                room = limit
            part = flat[begin : begin + room * ROW]
            chunks[-1].append(part)
            room -= rows_of(part.numel())
            begin += part.numel()
    return chunks
