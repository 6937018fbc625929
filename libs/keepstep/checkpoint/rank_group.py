"""The ranks of a save: all of the job, those of a process group, or this process alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from keepstep.state.errors import CheckpointError
from keepstep.state.local_parts import Mesh, Part, TensorPart
from keepstep_mesh.text import listed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_NAMED = 5


def ranks(
    rank: int | None, world_size: int | None, process_group: ProcessGroup | None = None, *, no_dist: bool = False
) -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks. Raises ``CheckpointError`` if they are invalid."""
    if no_dist:
        return 0, 1
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is None:
        rank = torch.distributed.get_rank(process_group) if initialized else int(os.environ.get("RANK", "0"))
    if world_size is None:
        world_size = (
            torch.distributed.get_world_size(process_group) if initialized else int(os.environ.get("WORLD_SIZE", "1"))
        )
    if process_group is not None and rank < 0:
        raise CheckpointError("this process is not in process_group: call save only on the ranks of the group")
    if not 0 <= rank < world_size:
        raise CheckpointError(f"invalid rank {rank} of {world_size}: expected 0 to {world_size - 1}")
    return rank, world_size


def in_group(parts: Mapping[str, Part], process_group: ProcessGroup | None) -> dict[str, Part]:
    """Return ``parts`` with the ranks of their meshes as ranks of the group. None: they are the same.

    Raises:
        CheckpointError: a shard is held only by ranks outside the group.
    """
    if process_group is None:
        return dict(parts)
    in_order = torch.distributed.get_process_group_ranks(process_group)
    numbers = {rank: number for number, rank in enumerate(in_order)}
    here = torch.distributed.get_rank()
    return {
        key: replace(part, mesh=_mesh(key, part.mesh, numbers, here))
        if isinstance(part, TensorPart) and part.mesh is not None
        else part
        for key, part in parts.items()
    }


def _mesh(key: str, mesh: Mesh, numbers: Mapping[int, int], here: int) -> Mesh:
    """Return the mesh, or the copy of it that this rank holds, in the ranks of the group."""
    all_ranks = np.asarray(mesh.ranks).reshape(mesh.shape)
    if not numbers.keys() >= set(mesh.ranks) and here in mesh.ranks:
        place = np.argwhere(all_ranks == here)[0]
        own = tuple(
            slice(place[dimension], place[dimension] + 1) if dimension in mesh.copied else slice(None)
            for dimension in range(len(mesh.shape))
        )
        all_ranks = all_ranks[own]
    found = all_ranks.flatten().tolist()
    if outside := [rank for rank in found if rank not in numbers]:
        raise CheckpointError(
            f"{key}: ranks {listed(map(str, outside), MAX_NAMED)} hold shards of it, but are not in process_group: "
            f"save with a group that has all shards"
        )
    return Mesh(tuple(numbers[rank] for rank in found), tuple(all_ranks.shape), mesh.placements)
