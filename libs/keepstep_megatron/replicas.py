"""Comparison of values that several ranks hold, of which one is saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from keepstep.checkpoint.saving import digest_of
from keepstep.state.errors import UnsupportedValue
from keepstep.state.local_parts import ObjectPart, TensorPart
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedBase, StateDict
from keepstep_megatron.validation import ShardRow
from keepstep_mesh.protocol.boxes import Box, whole
from keepstep_mesh.text import listed

MAX_NAMED = 5


def digest(value: Any) -> bytes:
    """Return the digest of a value. Empty: it has none, because keepstep's format cannot hold it."""
    try:
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            pieces = ((whole(shape), value.detach()),)
            return digest_of(TensorPart((), value.dtype, shape, pieces, None, is_sharded=False))
        return digest_of(ObjectPart((), value))
    except UnsupportedValue:
        return b""


def digests_of(leaves: Iterable[ShardedBase]) -> dict[int, bytes]:
    """Return the digest of the data of each leaf, by its position."""
    return {number: digest(leaf.data) for number, leaf in enumerate(leaves)}


def common_digests(state: StateDict) -> dict[str, bytes]:
    """Return the digest of each value of a state without sharded leaves, by its path."""
    return {".".join(map(str, path)): digest(value) for path, value in _leaves(state, ())}


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def different_paths(first: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Return the paths that only one state has, or whose values differ."""
    return sorted(
        path
        for path in first.keys() | other.keys()
        if path not in first or path not in other or (first[path] and other[path] and first[path] != other[path])
    )


def check_equal(rows: Sequence[Sequence[ShardRow]], digests: Sequence[Mapping[int, bytes]]) -> None:
    """Raise ``CheckpointingException`` if two ranks hold different data for the same part of a value.

    Args:
        rows: of each rank.
        digests: of each rank: the digest of the data of each row, by its position.
    """
    known: dict[tuple[Any, ...], tuple[int, bytes]] = {}
    problems = []
    for rank, (local, of_rank) in enumerate(zip(rows, digests, strict=True)):
        for number, row in enumerate(local):
            found = of_rank.get(number, b"")
            first, expected = known.setdefault((row.key, *row.chunk, row.start, row.stop), (rank, found))
            if found != expected:
                problems.append(f"{row.key!r} {Box(*row.chunk)} differs between ranks {first} and {rank}")
    if problems:
        raise CheckpointingException(f"replicas differ: {listed(problems, MAX_NAMED)}")
