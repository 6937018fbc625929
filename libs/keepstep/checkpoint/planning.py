"""Which rank writes which part of a state, decided by every rank alone from the layouts of all ranks. Pure.

Rules:

* A layout describes what one rank holds, but not its values. In an ordinary job all ranks have equal layouts.
* Every rank computes the same plan from the same layouts, so no rank has to decide for others.
* A whole tensor, or another value, that several ranks hold is written by one of them: the one with the least to write
  so far, largest values first. The same holds for the copies of a shard along a replicated dimension of a mesh.
* A rank that has a key with another dtype or shape than others, or without its shard of a tensor, is an error on
  every rank, before a byte is written. So is a tensor whose shards overlap or leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import msgpack
import numpy as np

from keepstep.state.errors import CheckpointError
from keepstep.state.local_parts import Mesh, Part, TensorPart
from keepstep.state.values.leaves import TORCH_DTYPE_NAMES
from keepstep_mesh.protocol.boxes import Box, Sizes, uncovered
from keepstep_mesh.text import listed

VERSION = 1
MAX_NAMED = 5
Ranks: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True)
class Row:
    """One key of a layout."""

    dtype: str
    """Empty: not a tensor."""
    shape: Sizes
    itemsize: int
    mesh: Mesh | None
    boxes: tuple[Box, ...] | None
    """The shards of this rank, if its tensor is sharded without a mesh."""
    digest: bytes
    """Of the value, if replicated values are compared; else empty."""

    @property
    def alike(self) -> tuple[Any, ...]:
        """Properties that all ranks with the key must agree on."""
        return (self.dtype, self.shape, self.mesh, self.boxes is None)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize if self.dtype else 1

    def __str__(self) -> str:
        if not self.dtype:
            return "a value that is not a tensor"
        sharded = "" if self.mesh is None else f", sharded over ranks {listed(map(str, self.mesh.ranks), MAX_NAMED)}"
        return f"a {self.dtype} tensor of shape {self.shape}{sharded}"


@dataclass(frozen=True)
class RankLayout:
    """Description of what one rank holds."""

    rows: Mapping[str, Row]

    @classmethod
    def of(cls, parts: Mapping[str, Part], digests: Mapping[str, bytes]) -> RankLayout:
        """Return the layout of ``parts``. ``digests``: of the replicated values, to compare them; else empty."""
        return cls({key: _row(part, digests.get(key, b"")) for key, part in parts.items()})

    def pack(self) -> bytes:
        """Return the layout as bytes. Equal layouts have equal bytes."""
        meshes: dict[Mesh, int] = {}
        rows = []
        for key, row in sorted(self.rows.items()):
            mesh = None if row.mesh is None else meshes.setdefault(row.mesh, len(meshes))
            boxes = None if row.boxes is None else [[box.offset, box.shape] for box in row.boxes]
            rows.append([key, row.dtype, row.shape, row.itemsize, mesh, boxes, row.digest])
        packed: bytes = msgpack.packb([VERSION, [[one.ranks, one.shape, one.placements] for one in meshes], rows])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> RankLayout:
        """Read the layout of another rank. Raises ``CheckpointError``."""
        try:
            version, packed_meshes, rows = msgpack.unpackb(data, use_list=False)
            if version != VERSION:
                raise CheckpointError(
                    f"a rank sent a layout of version {version}, this build reads {VERSION}: run one version of "
                    f"keepstep on all ranks"
                )
            meshes = [Mesh(*one) for one in packed_meshes]
            return cls(
                {
                    key: Row(
                        dtype,
                        shape,
                        itemsize,
                        None if mesh is None else meshes[mesh],
                        None if boxes is None else tuple(Box(*box) for box in boxes),
                        digest,
                    )
                    for key, dtype, shape, itemsize, mesh, boxes, digest in rows
                }
            )
        except (ValueError, TypeError, IndexError, msgpack.exceptions.UnpackException) as error:
            raise CheckpointError(f"a rank sent an invalid layout: {error}") from error


def _row(part: Part, digest: bytes) -> Row:
    if not isinstance(part, TensorPart):
        return Row("", (), 0, None, None, digest)
    boxes = tuple(box for box, _ in part.pieces) if part.is_sharded and part.mesh is None else None
    return Row(TORCH_DTYPE_NAMES[part.dtype], part.shape, part.dtype.itemsize, part.mesh, boxes, digest)


@dataclass(frozen=True)
class Plan:
    """The writer of each part."""

    owners: Mapping[str, int]
    """Rank that writes each key that is not sharded."""
    copies: Mapping[str, int]
    """Which copy of the shards of a DTensor is written: its position along the replicated dimensions of its mesh."""
    boxes: Mapping[str, Mapping[Box, int]]
    """Rank that writes each shard of a tensor that is sharded without a mesh."""

    def writes(self, rank: int, key: str, part: Part) -> Part | None:
        """Return what ``rank`` writes of a part that it holds; None: nothing."""
        if key in self.owners:
            return part if self.owners[key] == rank else None
        assert isinstance(part, TensorPart)
        if part.mesh is not None:
            return part if _copy_of(part.mesh, rank) == self.copies[key] else None
        mine = tuple(piece for piece in part.pieces if self.boxes[key][piece[0]] == rank)
        return TensorPart(part.path, part.dtype, part.shape, mine, None, True) if mine else None


def _copy_of(mesh: Mesh, rank: int) -> int:
    """Return the position of ``rank`` along the replicated dimensions; -1: it is not in the mesh."""
    if rank not in mesh.ranks:
        return -1
    place = np.unravel_index(mesh.ranks.index(rank), mesh.shape)
    copy = 0
    for dimension in mesh.copied:
        copy = copy * mesh.shape[dimension] + int(place[dimension])
    return copy


def plan(layouts: Sequence[RankLayout], of_rank: Sequence[int]) -> Plan:
    """Decide who writes what.

    Args:
        layouts: the different layouts of the ranks.
        of_rank: for each rank, the position of its layout in ``layouts``.

    Raises:
        CheckpointError: the layouts contradict each other, or a tensor is not covered.
    """
    return _Planner(layouts, of_rank).run()


class _Planner:
    def __init__(self, layouts: Sequence[RankLayout], of_rank: Sequence[int]) -> None:
        self._layouts = layouts
        self._ranks = [np.flatnonzero(np.asarray(of_rank) == number) for number in range(len(layouts))]
        self._world = len(of_rank)
        self._load = np.zeros(self._world, np.int64)
        """Bytes that each rank writes so far."""
        self._groups: dict[Mesh, Ranks] = {}
        self._problems: list[str] = []

    @cached_property
    def _everyone(self) -> Ranks:
        return np.arange(self._world)

    def run(self) -> Plan:
        owners: dict[str, int] = {}
        copies: dict[str, int] = {}
        boxes: dict[str, Mapping[Box, int]] = {}
        for key, found in sorted(self._found().items(), key=lambda one: (-one[1][0][1].nbytes, one[0])):
            row = found[0][1]
            if not self._agree(key, found):
                continue
            holders = self._holders(found)
            if row.boxes is not None:
                boxes[key] = self._share_boxes(key, row, found)
            elif row.mesh is None:
                owner = int(holders[np.argmin(self._load[holders])])
                self._load[owner] += row.nbytes
                owners[key] = owner
            elif self._is_held(key, row.mesh, holders):
                copies[key] = self._choose_copy(row.mesh, row.nbytes)
        if self._problems:
            raise CheckpointError(
                "the ranks cannot save this state together: " + listed(self._problems, MAX_NAMED, "; ")
            )
        return Plan(owners, copies, boxes)

    def _found(self) -> dict[str, list[tuple[int, Row]]]:
        """Return, for each key, the layouts that have it, and their rows."""
        found: dict[str, list[tuple[int, Row]]] = {}
        for number, layout in enumerate(self._layouts):
            for key, row in layout.rows.items():
                found.setdefault(key, []).append((number, row))
        return found

    def _holders(self, found: list[tuple[int, Row]]) -> Ranks:
        if len(found) == len(self._layouts):
            return self._everyone
        return np.sort(np.concatenate([self._ranks[number] for number, _ in found]))

    def _agree(self, key: str, found: list[tuple[int, Row]]) -> bool:
        (first, row), *others = found
        for number, other in others:
            ranks = f"rank {self._ranks[first][0]} has {{}}, rank {self._ranks[number][0]} has {{}}"
            if other.alike != row.alike:
                self._problems.append(f"{key}: {ranks.format(row, other)}")
                return False
        differing = self._differing(row.mesh, found)
        if differing is not None:
            self._problems.append(
                f"{key} differs between ranks {differing[0]} and {differing[1]}, but one copy of it would be stored"
            )
        return differing is None

    def _differing(self, mesh: Mesh | None, found: list[tuple[int, Row]]) -> tuple[int, int] | None:
        """Return two ranks that have different copies of one value; None: none have."""
        if len(found) == 1:
            return None
        digests = {int(rank): row.digest for number, row in found for rank in self._ranks[number]}
        groups = [list(digests)] if mesh is None else self._groups_of(mesh).tolist()
        for ranks in groups:
            for rank in ranks[1:]:
                if digests.get(rank) != digests.get(ranks[0]):
                    return ranks[0], rank
        return None

    def _is_held(self, key: str, mesh: Mesh, holders: Ranks) -> bool:
        """Return whether all ranks of ``mesh`` hold the key."""
        if len(holders) == self._world and max(mesh.ranks) < self._world:
            return True
        absent = sorted(set(mesh.ranks) - set(holders.tolist()))
        if not absent:
            return True
        if max(absent) >= self._world:
            why = f"this checkpoint has {self._world} ranks; pass rank= and world_size= that fit the device mesh"
        else:
            why = "every rank of a device mesh must save its shard"
        self._problems.append(f"{key}: missing shards of ranks {listed(map(str, absent), MAX_NAMED)}: {why}")
        return False

    def _choose_copy(self, mesh: Mesh, nbytes: int) -> int:
        groups = self._groups_of(mesh)
        copy = int(np.argmin(self._load[groups].sum(0))) if groups.shape[1] > 1 else 0
        self._load[groups[:, copy]] += nbytes // len(groups)
        return copy

    def _groups_of(self, mesh: Mesh) -> Ranks:
        """Return the ranks of a mesh by shard (row) and copy (column)."""
        groups = self._groups.get(mesh)
        if groups is None:
            last = range(-len(mesh.copied), 0)
            ranks = np.moveaxis(np.asarray(mesh.ranks).reshape(mesh.shape), mesh.copied, last)
            copies = math.prod(mesh.shape[dimension] for dimension in mesh.copied)
            groups = self._groups[mesh] = ranks.reshape(-1, copies)
        return groups

    def _share_boxes(self, key: str, row: Row, found: list[tuple[int, Row]]) -> dict[Box, int]:
        owners: dict[Box, list[int]] = {}
        for number, one in found:
            for box in one.boxes or ():
                owners.setdefault(box, []).extend(self._ranks[number].tolist())
        problem = uncovered(row.shape, list(owners))
        if problem:
            self._problems.append(f"{key}: {problem}")
        chosen = {}
        for box, ranks in owners.items():
            chosen[box] = min(ranks, key=lambda rank: (self._load[rank], rank))
            self._load[chosen[box]] += box.volume * row.itemsize
        return chosen
