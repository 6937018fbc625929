"""The bytes of a described state: its pack, read chunk by chunk from the memory of the tensors."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch

from keepstep.state.pack_layout import PackLayout
from keepstep_mesh.protocol.manifest import ALIGNMENT, CHUNK_BYTES, PackHasher, chunk_count, chunk_length
from keepstep_mesh.protocol.state_content import pack_content

_GAP = memoryview(bytes(ALIGNMENT))
"""Between two regions."""
Flat: TypeAlias = torch.Tensor | memoryview
"""Bytes in one dimension: a tensor of a CUDA device, or memory of the CPU."""
Unread: TypeAlias = Mapping[int, Callable[[], torch.Tensor]]
"""Tensors whose memory has no values yet, by its address: functions that read them."""
KEPT_BYTES = 64 << 20
KEPT_TENSORS = 2
"""Tensors that were read or copied are kept, because chunks share them: at least so many, and more up to
``KEPT_BYTES``."""


class Pack:
    """The pack of a state. The tensors must not change while it is used.

    Args:
        layout: the state. Tensors with gaps, and those of CUDA devices, are copied when a chunk needs them.
        unread: tensors of the state that are read when a chunk needs them, perhaps several times.
    """

    def __init__(self, layout: PackLayout, unread: Unread | None = None) -> None:
        *self._starts, self.nbytes = layout.content.positions()
        self.content_bytes = pack_content(layout.content)
        self._sources = layout.sources
        self._unread = unread
        for device in {one.device for one in self._sources if isinstance(one, torch.Tensor) and not one.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()  # other threads read chunks, on streams of their own
        self._made = _Made()
        self.chunks = chunk_count(self.nbytes)

    def digests(self) -> PackHasher:
        """Return the digests of all chunks."""
        hasher = PackHasher(self.nbytes)
        for number in range(self.chunks):
            hasher.add(self.pieces(number))
        return hasher

    def chunk(self, number: int) -> memoryview:
        """Return the bytes of a chunk: the memory of its tensor, or a copy if it has several."""
        pieces = list(self.pieces(number))
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def pieces(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a chunk, as the memory of its tensors and what lies between them."""
        at = number * CHUNK_BYTES
        end, region = at + chunk_length(self.nbytes, number), bisect_right(self._starts, at) - 1
        while at < end:
            if at < self._starts[region]:
                piece = _GAP[: min(self._starts[region], end) - at]
            else:
                piece = self._part(region, at, end)
                region += 1
            if piece.nbytes:
                yield piece
            at += piece.nbytes

    def _part(self, region: int, start: int, end: int) -> memoryview:
        """Return the bytes of a region that are between two positions of the pack."""
        part, begin = self._bytes_of(region), self._starts[region]
        if begin < start or end - begin < len(part):
            part = part[max(start - begin, 0) : max(end - begin, 0)]
        if isinstance(part, torch.Tensor):  # to pinned memory, of which torch keeps what is free
            return _view(torch.empty(len(part), dtype=torch.uint8, pin_memory=True).copy_(part))
        return part

    def _bytes_of(self, region: int) -> Flat:
        source = self._sources[region]
        if not isinstance(source, torch.Tensor):
            return source.reshape(-1).view(np.uint8).data
        if self._unread and (read := self._unread.get(source.data_ptr())) is not None:
            return self._made.bytes_of(region, lambda: _flat(read()))
        return _flat(source) if source.is_contiguous() else self._made.bytes_of(region, lambda: _flat(source))


class _Made:
    """Bytes that a function makes, by region. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Flat] = OrderedDict()
        """The last one was used last."""
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def bytes_of(self, region: int, make: Callable[[], Flat]) -> Flat:
        with self._lock:
            found = self._kept.get(region)
            if found is None:
                found = self._kept[region] = make()
                self._kept_bytes += found.nbytes
                while len(self._kept) > KEPT_TENSORS and self._kept_bytes > KEPT_BYTES:
                    self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
            else:
                self._kept.move_to_end(region)
            return found


def _flat(source: torch.Tensor) -> Flat:
    flat = source.reshape(-1).contiguous().view(torch.uint8)
    return flat if flat.is_cuda else _view(flat)


def _view(flat: torch.Tensor) -> memoryview:
    view: memoryview = flat.numpy().data
    return view
