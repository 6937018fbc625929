"""The bytes that one rank writes: its pack, read chunk by chunk from the memory of the tensors."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from keepstep.state.errors import CheckpointError
from keepstep.state.pack_layout import Layout
from keepstep_mesh.protocol.manifest import (
    ALIGNMENT,
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Origin,
    PackHasher,
    Parts,
    chunk_count,
    chunk_length,
    pack_envelope,
)
from keepstep_mesh.protocol.state_content import pack_content

_GAP = memoryview(bytes(ALIGNMENT))
"""Between two regions."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Unread: TypeAlias = Mapping[int, Callable[[], torch.Tensor]]
"""Tensors whose memory has no values yet, by its address: functions that read them."""
KEPT_BYTES = 64 << 20
KEPT_TENSORS = 2
"""Tensors that were read are kept, because chunks share them: at least so many, and more up to ``KEPT_BYTES``."""


class Pack:
    """The pack of a state. The tensors must not change while it is used.

    Args:
        layout: the state. Tensors with gaps are copied, and tensors of CUDA devices when their chunk is read.
        unread: tensors of the state that are read when a chunk needs them, perhaps several times.
    """

    def __init__(self, layout: Layout, unread: Unread | None = None) -> None:
        *self._starts, self.nbytes = layout.content.positions()
        self.content_bytes = pack_content(layout.content)
        self._sources = [_flat(source) for source in layout.sources]
        self._reads = None if unread is None else _Reads(unread)
        self.chunks = chunk_count(self.nbytes)

    def digests(self) -> PackHasher:
        """Return the digests of all chunks."""
        hasher = PackHasher(self.nbytes)
        for number in range(self.chunks):
            hasher.add(self.chunk(number))
        return hasher

    def chunk(self, number: int) -> memoryview:
        """Return the bytes of a chunk: the memory of its tensor, or a copy if it has several."""
        pieces = self.pieces(number)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def pieces(self, number: int) -> list[memoryview]:
        """Return the bytes of a chunk, as the memory of its tensors and what lies between them."""
        at = number * CHUNK_BYTES
        end, region = at + chunk_length(self.nbytes, number), bisect_right(self._starts, at) - 1
        pieces = []
        while at < end:
            if at < self._starts[region]:
                pieces.append(_GAP[: min(self._starts[region], end) - at])
            else:
                pieces.append(self._part(region, at, end).data)
                region += 1
            at += pieces[-1].nbytes
        return [piece for piece in pieces if piece.nbytes]

    def _part(self, region: int, start: int, end: int) -> Bytes:
        """Return the bytes of a region that are between two positions of the pack."""
        source, begin = self._sources[region], self._starts[region]
        if self._reads is not None and not isinstance(source, torch.Tensor):
            source = self._reads.values(source)
        part = source[max(start - begin, 0) : max(end - begin, 0)]
        return part.cpu().numpy() if isinstance(part, torch.Tensor) else part


class _Reads:
    """Values of ``Unread`` tensors. Safe to use from several threads."""

    def __init__(self, unread: Unread) -> None:
        self._unread = unread
        self._kept: OrderedDict[int, Bytes] = OrderedDict()
        """By address; the last one was used last."""
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def values(self, memory: Bytes) -> Bytes:
        """Return the values of a tensor, by its memory."""
        address = int(memory.ctypes.data)
        read = self._unread.get(address)
        if read is None:
            return memory
        with self._lock:
            found = self._kept.get(address)
            if found is None:
                values = _flat(read())
                assert not isinstance(values, torch.Tensor), "the values are on the CPU"
                found = self._kept[address] = values
                self._kept_bytes += found.nbytes
                while len(self._kept) > KEPT_TENSORS and self._kept_bytes > KEPT_BYTES:
                    self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
            else:
                self._kept.move_to_end(address)
            return found


def manifest_of(content: bytes, digests: Sequence[bytes], parts: Parts, origin: Origin, rank: int) -> bytes:
    """Return the manifest of a pack. Raises ``CheckpointError`` if it is too large.

    Args:
        content: that the pack has, in bytes.
        digests: of its chunks.
        parts: digests of their parts.
        origin: of the state.
        rank: whose state it is.
    """
    chunks = b"".join(digests)
    manifest = pack_envelope(origin, content, chunks, parts)
    if len(manifest) > MAX_MANIFEST_BYTES:
        manifest = pack_envelope(origin, content, chunks)
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"manifest of rank {rank} too large: {len(manifest)} bytes (limit {MAX_MANIFEST_BYTES})")
    return manifest


def _flat(source: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor | Bytes:
    if isinstance(source, torch.Tensor):
        flat = source.reshape(-1).contiguous().view(torch.uint8)
        return flat if flat.is_cuda else flat.numpy()
    return source.reshape(-1).view(np.uint8)
