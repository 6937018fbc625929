"""The bytes of a state in main memory, as they came from another rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from keepstep.state.errors import TransferError
from keepstep.state.pack import Pack
from keepstep.state.pack_layout import describe
from keepstep.state.restoring import Destination
from keepstep.state.state_manifest import read_content
from keepstep_mesh.protocol.manifest import chunk_count, chunk_digests, cut_pieces
from keepstep_mesh.protocol.state_content import pack_content

BLOCK_BYTES = 128 << 10
"""The rest of a state is in a piece of its own, which malloc takes from memory that it has already."""


class Memory:
    """Blocks of main memory that are used again, because new memory costs more time than the copy into it.

    Safe to use from any thread.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, size: int) -> list[memoryview]:
        """Return memory of ``size`` bytes in pieces. MemoryError: no memory is left."""
        whole, rest = divmod(size, BLOCK_BYTES)
        return [*(self._block() for _ in range(whole)), *([memoryview(bytearray(rest))] if rest else [])]

    def _block(self) -> memoryview:
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(BLOCK_BYTES))

    def give_back(self, blocks: Sequence[memoryview]) -> None:
        """Let other states use these blocks."""
        self._free += [one for one in blocks if one.nbytes == BLOCK_BYTES]

    @property
    def free_bytes(self) -> int:
        """Bytes that are in no state now."""
        return len(self._free) * BLOCK_BYTES

    def clear(self) -> None:
        """Give blocks that are in no state back to the system."""
        self._free.clear()


class Stored:
    """The bytes of one state, and their digests. Its blocks are used again when the last reference to it is gone.

    Args:
        content: description of the state, see ``keepstep.state.state_manifest``.
        digests: of the chunks of ``blocks``, one after the other.
        blocks: the bytes.
        memory: of which the blocks are; None: of none.
    """

    def __init__(
        self, content: bytes, digests: bytes, blocks: Sequence[memoryview], memory: Memory | None = None
    ) -> None:
        self._content = content
        self._digests = digests
        self._blocks = blocks
        self._memory = memory

    def __del__(self) -> None:
        if self._memory is not None:
            self._memory.give_back(self._blocks)

    @classmethod
    def of(cls, state: Any, memory: Memory) -> Stored:
        """Return a copy of ``state`` in blocks of ``memory``."""
        pack = pack_of(state)
        blocks = memory.take(pack.nbytes)
        for block, part in zip(blocks, cut_pieces(pieces_of(pack), BLOCK_BYTES), strict=True):
            copied(part, block)
        return cls(pack.content_bytes, chunk_digests(blocks), blocks, memory)

    @property
    def digests(self) -> bytes:
        """Of the chunks of its bytes, one after the other."""
        return self._digests

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return len(self._content) + len(self._digests) + sum(one.nbytes for one in self._blocks)

    def state(self) -> Any:
        """Return the state, in memory of its own. TransferError: the bytes are damaged."""
        if chunk_digests(self._blocks) != self._digests:
            raise TransferError("a copy is damaged: its digests are not those of its owner")
        target = Target(self._content)
        rest = iter(target.segments)
        segment = next(rest, None)
        for block in self._blocks:
            at = 0
            while at < block.nbytes:
                assert segment is not None
                count = min(segment.nbytes, block.nbytes - at)
                segment[:count] = block[at : at + count]
                at += count
                segment = segment[count:] if count < segment.nbytes else next(rest, None)
        return target.result()


class Target:
    """Memory for a state that is received.

    Args:
        content: description of the state.

    Raises:
        ManifestError: the description is invalid, or the memory is too small.
    """

    def __init__(self, content: bytes) -> None:
        self._destination = Destination(read_content(content))
        chunks = chunk_count(self._destination.pack_bytes)
        self.segments = [one for number in range(chunks) for one in self._destination.segments(number)]
        """Of the pack, in order."""

    def result(self) -> Any:
        """Return the state, whose bytes are all there."""
        return self._destination.result()


@lru_cache(maxsize=256)
def pack_bytes(content: bytes) -> int:
    """Return how many bytes the pack of a state has. ManifestError: the description is invalid."""
    return read_content(content).positions()[-1]


def pack_of(state: Any) -> Pack:
    """Return the bytes of a state, in its own memory. UnsupportedValue: it has a value that cannot be stored."""
    return Pack(describe(state))


@dataclass(frozen=True)
class TensorPack:
    """The pack of a dict of tensors that share no memory, as ``pack_of`` makes it, for less time."""

    content_bytes: bytes
    pieces: list[memoryview]


def pack_of_gradients(gradients: dict[str, torch.Tensor]) -> Pack | TensorPack:
    """Return the bytes of gradients, in their own memory. Gradients of the same shapes are described once."""
    if not all(_is_simple(one) for one in gradients.values()):
        return pack_of(gradients)
    content, gaps = _described(tuple((name, one.dtype, one.shape) for name, one in gradients.items()))
    pieces: list[memoryview] = []
    for gap, one in zip(gaps, gradients.values(), strict=True):
        if gap:
            pieces.append(memoryview(bytes(gap)))
        if one.numel():
            pieces.append(one.view(-1).view(torch.uint8).numpy().data)
    return TensorPack(content, pieces)


def _is_simple(one: torch.Tensor) -> bool:
    return one.device.type == "cpu" and one.is_floating_point() and one.is_contiguous() and not one.is_neg()


@lru_cache(maxsize=4096)
def _described(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> tuple[bytes, tuple[int, ...]]:
    """Return the description of tensors with these names, dtypes and shapes, and the bytes before each of them."""
    content = describe({name: torch.empty(shape, dtype=dtype) for name, dtype, shape in tensors}).content
    starts, ends = content.positions(), [0]
    ends += [start + length for start, length in zip(starts, content.regions, strict=False)]
    return pack_content(content), tuple(start - end for start, end in zip(starts[: len(tensors)], ends, strict=False))


def pieces_of(pack: Pack | TensorPack) -> Iterable[memoryview]:
    """Yield the bytes of a pack, in the memory of its tensors."""
    if isinstance(pack, TensorPack):
        return pack.pieces
    return (piece for number in range(pack.chunks) for piece in pack.pieces(number))


def copied(pieces: Iterable[memoryview], target: memoryview) -> memoryview:
    """Copy pieces one after the other. Return the part of ``target`` that they fill."""
    end = 0
    for piece in pieces:
        target[end : end + piece.nbytes] = piece
        end += piece.nbytes
    return target[:end]
