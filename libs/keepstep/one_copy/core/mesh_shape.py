"""The dimensions of the device mesh of a world, and the ranks of each of its process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """The process group of one rank in one dimension of the mesh."""

    name: str
    """Of the dimension."""
    ranks: tuple[int, ...]
    """Ranks of the world that belong to it, in order."""
    index: int
    """Of this rank among them."""
    number: int
    """Different for each group of the world."""


SAME_DATA = frozenset({"tp", "cp", "pp"})
"""Names of dimensions whose ranks usually compute on the same samples."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a global batch on which a rank computes."""

    indices: range
    """Of its samples in the batch."""
    weight: float
    """Factor of the mean loss of the part: near 1, since parts differ by a sample at most."""


class MeshShape:
    """Names and sizes of the dimensions, outermost first.

    Args:
        sizes: size of each dimension by its name. One of them is -1: the others share the ranks of the world with it,
            so that it changes with the number of members.

    Raises:
        ValueError: the sizes are invalid.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        open_ones = [name for name, size in sizes.items() if size == -1]
        wrong = [name for name, size in sizes.items() if size != -1 and size < 1]
        if len(open_ones) != 1 or wrong:
            raise ValueError(
                f"mesh={dict(sizes)} must have one dimension of size -1, which changes with the number of members, and "
                f"sizes of at least 1 otherwise, such as {{'fsdp': -1}} or {{'fsdp': -1, 'tp': 2}}"
            )
        self.sizes = dict(sizes)
        self._fixed = math.prod(size for size in sizes.values() if size != -1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the dimensions."""
        return tuple(self.sizes)

    def fits(self, size: int) -> bool:
        """Return whether a world of ``size`` ranks fills the mesh."""
        return size > 0 and size % self._fixed == 0

    def multiple(self, ranks: int) -> int:
        """Return of which number of members, with so many ranks each, a world that fills the mesh has a multiple."""
        return self._fixed // math.gcd(self._fixed, ranks)

    def of(self, size: int) -> tuple[int, ...]:
        """Return the size of each dimension in a world of ``size`` ranks, which fit."""
        return tuple(size // self._fixed if one == -1 else one for one in self.sizes.values())

    def lines(self, rank: int, size: int) -> tuple[Line, ...]:
        """Return the process groups of ``rank`` in a world of ``size`` ranks, one for each dimension."""
        shape = self.of(size)
        found = []
        for dimension, (name, length) in enumerate(zip(self.names, shape, strict=True)):
            stride = math.prod(shape[dimension + 1 :])
            index = rank // stride % length
            first = rank - index * stride
            ranks = tuple(first + other * stride for other in range(length))
            found.append(Line(name, ranks, index, dimension * size + first))
        return tuple(found)

    def data_dims(self, names: Sequence[str] | None) -> tuple[str, ...]:
        """Return the dimensions over which data are divided. None: all but those of ``SAME_DATA``.

        Raises:
            ValueError: unknown dimensions.
        """
        if names is None:
            return tuple(name for name in self.names if name not in SAME_DATA)
        if odd := [name for name in names if name not in self.sizes]:
            raise ValueError(f"data_dims={list(names)} has {odd[0]!r}; the mesh has {', '.join(self.names)}")
        return tuple(names)

    def part(self, rank: int, size: int, dims: Sequence[str]) -> tuple[int, int]:
        """Return the number of the part of ``rank``, and how many parts a batch has. Arguments as of ``share``."""
        index, parts, stride = 0, 1, size
        for name, length in zip(self.names, self.of(size), strict=True):
            stride //= length
            if name in dims:
                index, parts = index * length + rank // stride % length, parts * length
        return index, parts

    def share(self, rank: int, size: int, samples: int, dims: Sequence[str]) -> Share:
        """Return the part of a batch of ``samples`` for ``rank`` of a world of ``size`` ranks.

        Args:
            rank: in the world.
            size: of the world; it fits.
            samples: number of samples in the batch.
            dims: dimensions over which data are divided.

        Raises:
            ValueError: fewer samples than parts.
        """
        index, parts = self.part(rank, size, dims)
        if samples < parts:
            raise ValueError(
                f"a batch of {samples} samples is too small for {parts} parts: use at least one sample for each part"
            )
        first, last = index * samples // parts, (index + 1) * samples // parts
        return Share(range(first, last), (last - first) * parts / samples)
