"""One part of an object of all ranks, such as the random state of each rank."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Self

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping.sharded_base import ReplicaId, ShardedBase

UNKNOWN = -1
"""Size of an axis that an old unique key does not have."""
_SHARD = re.compile(r"(.+)/shard_([\d.]*)_([\d.]*)", re.DOTALL)


@dataclass
class ShardedObject(ShardedBase):
    """One element of a global array of objects.

    The array cannot be sharded in another way on load: a rank asks for elements that were saved.

    Args:
        key: name of the array, equal on all ranks.
        data: the element, of any type; None: only the description is needed.
        global_shape: shape of the array, in elements.
        global_offset: index of the element in the array.
        replica_id: which copy of the element this rank has; see ``is_main_replica``.

    Raises:
        CheckpointingException: the offset is not inside of the shape.
    """

    key: str
    data: Any = field(repr=False)
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Check that the offset is inside of the shape. Raises ``CheckpointingException``."""
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointingException(
                f"ShardedObject {self.key!r} has global_offset {self.global_offset} and global_shape "
                f"{self.global_shape}: expected the same number of axes"
            )
        for offset, size in zip(self.global_offset, self.global_shape, strict=True):
            if offset < 0 or (size != UNKNOWN and offset >= size):
                raise CheckpointingException(
                    f"ShardedObject {self.key!r} has global_offset {self.global_offset}, outside of its global_shape "
                    f"{self.global_shape}: expected 0 <= offset < size for each axis"
                )

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    def without_data(self) -> Self:
        """Return a copy with ``data=None``."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Name of this element: ``key/shard_OFFSET_SHAPE``, with dots between axes."""
        offset, shape = (".".join(map(str, sizes)) for sizes in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @property
    def shards(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.global_shape)

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> Self:
        """Return the object that a unique key names, without data.

        Args:
            unique_key: as ``unique_key`` returns it. If its shape has one axis less than its offset, as in old
                checkpoints, the size of the last axis is -1.
            replica_id: of the new object.

        Raises:
            CheckpointingException: the text is not a unique key.
        """
        found = _SHARD.fullmatch(unique_key)
        try:
            if found is None:
                raise ValueError
            offset, shape = _sizes(found[2]), _sizes(found[3])
        except ValueError:
            raise CheckpointingException(
                f"invalid unique key {unique_key!r}: expected KEY/shard_OFFSET_SHAPE, such as 'rng/shard_0.1_2.4'"
            ) from None
        if len(shape) + 1 == len(offset):
            shape += (UNKNOWN,)
        return cls(found[1], None, shape, offset, replica_id)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("."))) if text else ()
