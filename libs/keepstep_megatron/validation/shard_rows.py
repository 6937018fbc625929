"""Descriptions of the sharded leaves of a rank, without data, in the form in which ranks send them to each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgpack

from keepstep.state.values.leaves import TORCH_DTYPE_NAMES
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedObject, ShardedTensor, is_main_replica

VERSION = 1
Sizes: TypeAlias = tuple[int, ...]


class ShardRow(NamedTuple):
    """One sharded leaf of one rank."""

    key: str
    dtype: str
    """Name of the dtype; empty: a ``ShardedObject``."""
    global_shape: Sizes
    offset: Sizes
    box: Sizes
    """Shape of the part, with prepended axes; of an object: all 1."""
    is_regular: bool
    """All parts have the same shape."""
    start: int
    """First element of ``flattened_range``; -1: none."""
    stop: int
    is_main: bool

    @property
    def alike(self) -> tuple[Any, ...]:
        """Properties that all parts of one global value have in common."""
        return self.dtype, self.global_shape, self.is_regular, self.box if self.is_regular else None, self.start < 0

    @property
    def chunk(self) -> tuple[Sizes, Sizes]:
        """The box: its first element, and its shape."""
        return self.offset, self.box

    def __str__(self) -> str:
        if not self.dtype:
            return f"objects of global shape {self.global_shape}"
        flat = ", flattened" if self.start >= 0 else ""
        parts = f"parts of shape {self.box}" if self.is_regular else "parts of different shapes"
        return f"{self.dtype} of global shape {self.global_shape} in {parts}{flat}"


def row_of(leaf: Any) -> ShardRow:
    """Return the description of a ``ShardedTensor`` or ``ShardedObject``.

    Raises:
        CheckpointingException: the leaf is of another type, such as a factory.
    """
    if isinstance(leaf, ShardedTensor):
        part = leaf.flattened_range
        return ShardRow(
            leaf.key,
            TORCH_DTYPE_NAMES.get(leaf.dtype) or str(leaf.dtype),
            leaf.global_shape,
            leaf.global_offset,
            leaf.box_shape,
            leaf.has_regular_grid,
            -1 if part is None else part.start,
            -1 if part is None else part.stop,
            is_main_replica(leaf.replica_id),
        )
    if isinstance(leaf, ShardedObject):
        box = (1,) * len(leaf.global_shape)
        main = is_main_replica(leaf.replica_id)
        return ShardRow(leaf.key, "", leaf.global_shape, leaf.global_offset, box, True, -1, -1, main)
    key = getattr(leaf, "key", leaf)
    raise CheckpointingException(
        f"cannot save or load {type(leaf).__name__} {key!r} as it is: expected ShardedTensor or ShardedObject; call "
        f"apply_factories first"
    )


def pack_rows(rows: Iterable[ShardRow]) -> bytes:
    """Return the descriptions of a rank as bytes."""
    packed: bytes = msgpack.packb([VERSION, list(rows)])
    return packed


def unpack_rows(data: bytes) -> Sequence[ShardRow]:
    """Read the descriptions of another rank. Raises ``CheckpointingException``."""
    try:
        version, rows = msgpack.unpackb(data, use_list=False)
        if version != VERSION:
            raise CheckpointingException(
                f"a rank sent descriptions of version {version}, this build reads {VERSION}: run one version of "
                f"keepstep on all ranks"
            )
        return [ShardRow(*row) for row in rows]
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CheckpointingException(f"a rank sent invalid descriptions: {error}") from error
