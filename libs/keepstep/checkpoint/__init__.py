"""Durable checkpoints of any number of ranks, at a relay or in a directory, without a process group.

docs/torch-checkpoint.md shows them in use, also below torch.distributed.checkpoint.
"""

from __future__ import annotations

from keepstep.checkpoint.errors import (
    CheckpointAborted,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    MissingKeys,
)
from keepstep.checkpoint.loading import load, open_reader
from keepstep.checkpoint.saving import async_save, save
from keepstep.checkpoint.stored import CheckpointReader, StoredCheckpoint

__all__ = [
    "CheckpointAborted",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointReader",
    "MissingKeys",
    "StoredCheckpoint",
    "async_save",
    "load",
    "open_reader",
    "save",
]
