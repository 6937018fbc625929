"""Whether the main replicas of all ranks store every element of every global value exactly once. Pure.

Rules:

* All parts of a global value agree on dtype, global shape, and whether parts have equal shapes or are flattened.
* The main replicas of a tensor cover it without overlap. Those of one box with ``flattened_range`` tile that box.
* Each element of an array of objects has exactly one main replica.

Every rank decides alone from the rows of all ranks, so all of them raise the same error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedObject
from keepstep_megatron.validation.shard_rows import ShardRow, Sizes
from keepstep_mesh.protocol.boxes import Box, overlapping
from keepstep_mesh.text import listed

MAX_NAMED = 5


@dataclass
class _Parts:
    """The parts of one global value."""

    rank: int
    """The first that has one."""
    row: ShardRow
    mains: dict[tuple[Sizes, Sizes], list[tuple[int, ShardRow]]] = field(default_factory=dict)
    """For each box, the ranks with a main replica of it."""


def check_integrity(rows_of_ranks: Sequence[Sequence[ShardRow]]) -> None:
    """Check the rows of all ranks.

    Args:
        rows_of_ranks: for each rank, its rows.

    Raises:
        CheckpointingException: parts contradict each other, or an element has no main replica, or several. The error
            names key, chunk and ranks.
    """
    problems = integrity_problems(rows_of_ranks)
    if problems:
        raise CheckpointingException(f"Invalid access pattern: {listed(problems, MAX_NAMED, '; ')}")


def integrity_problems(rows_of_ranks: Sequence[Sequence[ShardRow]]) -> list[str]:
    """Return what is wrong with the rows of all ranks, ordered by key; empty: nothing. See ``check_integrity``."""
    by_key: dict[str, _Parts] = {}
    problems: dict[str, str] = {}
    seen = set[ShardRow]()
    for rank, rows in enumerate(rows_of_ranks):
        for row in rows:
            if not row.is_main:  # replicas of many ranks are equal
                if row in seen:
                    continue
                seen.add(row)
            parts = by_key.get(row.key)
            if parts is None:
                parts = by_key[row.key] = _Parts(rank, row)
            elif row.alike != parts.row.alike and row.key not in problems:
                problems[row.key] = (
                    f"{row.key!r}: rank {parts.rank} has {parts.row}, but rank {rank} has {row}: expected the same"
                )
            if row.is_main:
                parts.mains.setdefault(row.chunk, []).append((rank, row))
    objects = {_unique_key(row, row.offset) for rows in rows_of_ranks for row in rows if not row.dtype}
    for key, parts in by_key.items():
        if parts.row.dtype and key in objects:
            problems[key] = f"{key!r}: an object and a tensor are stored under this key: rename one of them"
        if key not in problems:
            found = next(_coverage_problems(parts), "")
            if found:
                problems[key] = f"{key!r}: {found}"
    return [problems[key] for key in sorted(problems)]


def _coverage_problems(parts: _Parts) -> Iterator[str]:
    if not math.prod(parts.row.global_shape):
        return  # no element to store
    for (offset, box), mains in parts.mains.items():
        if problem := _range_problem(math.prod(box), mains):
            kind = "" if parts.row.dtype else "Duplicate ShardedObject keys: "
            yield f"{kind}{_named(parts.row, offset, box)} {problem}"
    boxes = [Box(offset, box) for offset, box in parts.mains if math.prod(box)]
    if not parts.row.is_regular and (pair := overlapping(boxes)):
        (first, _), (second, _) = (parts.mains[one.offset, one.shape][0] for one in pair)
        yield f"the chunks {pair[0]} of rank {first} and {pair[1]} of rank {second} overlap"
    missing = _missing_in_grid(parts) if parts.row.is_regular else missing_box(parts.row.global_shape, boxes)
    if missing:
        name = _named(parts.row, missing.offset, missing.shape)
        yield f"{name} has no main replica: expected one rank that has it with replica_id 0"


def _range_problem(size: int, mains: list[tuple[int, ShardRow]]) -> str:
    """Return why the main replicas of a box do not tile it; empty: they do."""
    if mains[0][1].start < 0:
        if len(mains) == 1 or not size:
            return ""
        ranks = listed((str(rank) for rank, _ in mains), MAX_NAMED)
        return f"has {len(mains)} main replicas, on ranks {ranks}: expected one; give the others another replica_id"
    end, last = 0, -1
    for start, stop, rank in sorted((row.start, row.stop, rank) for rank, row in mains if row.start < row.stop):
        if start > end:
            return f"has no main replica of its elements {end} to {start}"
        if start < end:
            both = f"on ranks {last} and {rank}"
            return f"has two main replicas of its elements {start} to {min(end, stop)}, {both}: expected one"
        end, last = stop, rank
    return f"has no main replica of its elements {end} to {size}" if end < size else ""


def _named(row: ShardRow, offset: Sizes, box: Sizes) -> str:
    if row.dtype:
        return f"chunk {Box(offset, box)}"
    return f"object {_unique_key(row, offset)}"


def _unique_key(row: ShardRow, offset: Sizes) -> str:
    return ShardedObject(row.key, None, row.global_shape, offset).unique_key


def _missing_in_grid(parts: _Parts) -> Box | None:
    """Return the first part without a main replica, if all parts have one shape."""
    shape, box = parts.row.global_shape, parts.row.box
    if 0 in box:
        return Box((0,) * len(shape), shape)
    counts = [-(-size // part) for size, part in zip(shape, box, strict=True)]
    if len(parts.mains) == math.prod(counts) and not any(size % part for size, part in zip(shape, box, strict=True)):
        return None
    for number in range(len(parts.mains) + 1):  # one of them is missing
        offset = tuple(at * part for at, part in zip(_position(number, counts), box, strict=True))
        if (offset, box) not in parts.mains:
            return Box(offset, tuple(min(part, size - at) for at, part, size in zip(offset, box, shape, strict=True)))
    return None


def _position(number: int, counts: Sequence[int]) -> Sizes:
    """Return the place of an element in an array of that shape, counted along the last axis first."""
    place: Sizes = ()
    for count in reversed(counts):
        number, at = divmod(number, count)
        place = (at, *place)
    return place


def missing_box(shape: Sizes, boxes: Sequence[Box]) -> Box | None:
    """Return a part of a tensor of ``shape`` that no box covers; None: they cover it.

    The boxes do not overlap each other.
    """
    if sum(box.volume for box in boxes) == math.prod(shape):
        return None
    return _gap(0, shape, boxes)


def _gap(axis: int, shape: Sizes, boxes: Sequence[Box]) -> Box | None:
    """Return the first gap among the boxes, along the axes from ``axis``."""
    if axis == len(shape):
        return None if boxes else Box((), ())
    ends = {at for box in boxes for at in (box.offset[axis], box.offset[axis] + box.shape[axis])}
    for start, stop in pairwise(sorted({0, shape[axis], *ends})):
        inside = [one for one in boxes if one.offset[axis] <= start and one.offset[axis] + one.shape[axis] >= stop]
        found = _gap(axis + 1, shape, inside)
        if found is not None:
            return Box((start, *found.offset), (stop - start, *found.shape))
    return None
