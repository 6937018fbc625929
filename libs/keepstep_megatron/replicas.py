"""Comparison of values that several ranks hold, of which one is saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from keepstep.checkpoint.saving import digest_of
from keepstep.state.errors import UnsupportedValue
from keepstep.state.local_parts import ObjectPart, TensorPart
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedBase, StateDict
from keepstep_megatron.validation import ShardRow
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.boxes import Box, whole
from keepstep_mesh.text import listed

MAX_NAMED = 5
log = get_logger("keepstep.sharded")
CommonValue: TypeAlias = tuple[Sequence[str], str, bytes]
"""A value that is not sharded: the keys to it, its type, and its digest, which is empty if it has none."""


def digest(value: Any) -> bytes:
    """Return the digest of a value. Empty: it has none, because keepstep's format cannot hold it."""
    try:
        if isinstance(value, torch.Tensor) and not value.is_nested:
            shape = tuple(value.shape)
            pieces = ((whole(shape), value.detach()),)
            return digest_of(TensorPart((), value.dtype, shape, pieces, None, is_sharded=False))
        return digest_of(ObjectPart((), value))
    except UnsupportedValue:
        return b""


def digests_of(leaves: Iterable[ShardedBase]) -> dict[int, bytes]:
    """Return the digest of the data of each leaf, by its position."""
    return {number: digest(leaf.data) for number, leaf in enumerate(leaves)}


def common_values(state: StateDict) -> list[CommonValue]:
    """Return the place, type and digest of each value of a state without sharded leaves."""
    return [([repr(key) for key in path], str(type(value)), digest(value)) for path, value in _leaves(state, ())]


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def common_difference(first: Iterable[CommonValue], other: Iterable[CommonValue], rank: int) -> str:
    """Return how the common values of a rank differ from those of rank 0; empty: not at all."""
    ours, theirs = ({tuple(path): (kind, digest) for path, kind, digest in one} for one in (first, other))
    changed = [
        f"({_shown(path)}, {kind}, {theirs[path][0]})"
        for path, (kind, found) in ours.items()
        if path in theirs and found != theirs[path][1] and found and theirs[path][1]
    ]
    only_first, only_other = _only(ours, theirs), _only(theirs, ours)
    if not (changed or only_first or only_other):
        return ""
    lists = [f"[{listed(one, MAX_NAMED)}]" for one in (only_first, only_other, changed)]
    return (
        f"Rank {rank} common state dict differs from rank 0 common state dict. Keys only on rank 0: {lists[0]}, Keys "
        f"only on {rank}: {lists[1]}, Mismatched keys: {lists[2]}"
    )


def log_common_difference(values: Sequence[Iterable[CommonValue]], rank: int) -> None:
    """Log how the common values of this rank differ from those of rank 0.

    Args:
        values: of each rank.
        rank: this one.
    """
    if difference := common_difference(values[0], values[rank], rank):
        log.warning(difference)


def _only(here: Iterable[tuple[str, ...]], there: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the shortest beginnings of paths that only the first has."""
    known = {path[:length] for path in there for length in range(len(path) + 1)}
    found = {
        next(path[:length] for length in range(len(path) + 1) if path[:length] not in known): None
        for path in here
        if path not in known
    }
    return [_shown(path) for path in found]


def _shown(path: tuple[str, ...]) -> str:
    return f"({', '.join(path)}{',' if len(path) == 1 else ''})"


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


def check_equal_common(values: Sequence[Sequence[CommonValue]]) -> None:
    """Raise ``CheckpointingException`` if the common values of a rank differ from those of rank 0.

    Args:
        values: of each rank.
    """
    for rank, found in enumerate(values):
        if difference := common_difference(values[0], found, rank):
            raise CheckpointingException(difference)
