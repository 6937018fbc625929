"""Boxes: the parts of a tensor that its shards are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its first element, and its sizes."""

    offset: Sizes
    shape: Sizes

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the common part; None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(start + size, other_start + other_size)
            for start, size, other_start, other_size in zip(
                self.offset, self.shape, other.offset, other.shape, strict=True
            )
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds ``outer``."""
        return tuple(
            slice(start - outer_start, start - outer_start + size)
            for start, outer_start, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.shape, strict=True)) + "]"


def whole(shape: Sizes) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def uncovered(shape: Sizes, boxes: Sequence[Box]) -> str:
    """Return why ``boxes`` do not tile a tensor of ``shape``; empty: they do."""
    outside = next(
        (box for box in boxes if any(a + n > size for a, n, size in zip(box.offset, box.shape, shape, strict=True))),
        None,
    )
    if outside is not None:
        return f"the shard {outside} is outside of its shape {shape}"
    if (pair := overlapping(boxes)) is not None:
        return f"the shards {pair[0]} and {pair[1]} overlap"
    volume, total = sum(box.volume for box in boxes), math.prod(shape)
    return "" if volume == total else f"its shards have {volume} of {total} elements: a shard is missing"


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two different boxes that overlap; None: no two do. Sweeps along the dimension that separates most."""
    full = [box for box in boxes if box.volume]
    if len(full) < 2 or not full[0].shape:
        return (full[0], full[1]) if len(full) > 1 else None
    along = max(range(len(full[0].shape)), key=lambda dimension: len({box.offset[dimension] for box in full}))
    active: list[Box] = []
    for box in sorted(full, key=lambda one: one.offset[along]):
        active = [one for one in active if one.offset[along] + one.shape[along] > box.offset[along]]
        for one in active:
            if one.overlap(box) is not None:
                return one, box
        active.append(box)
    return None
