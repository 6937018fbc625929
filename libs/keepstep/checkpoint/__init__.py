"""Durable checkpoints of any number of ranks, at a relay or in a directory, without a process group.

docs/torch-checkpoint.md shows them in use, also below torch.distributed.checkpoint.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.loading import load, open_reader
from keepstep.checkpoint.saving import async_save, save
from keepstep.checkpoint.stored import CheckpointReader, StoredCheckpoint
from keepstep.state.errors import (
    CheckpointAborted,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    MissingKeys,
)

if TYPE_CHECKING:
    from keepstep_formats.torch_storage import RelayReader, RelayWriter

__all__ = [
    "CheckpointAborted",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointReader",
    "MissingKeys",
    "RelayReader",
    "RelayWriter",
    "StoredCheckpoint",
    "async_save",
    "load",
    "open_reader",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in ("RelayReader", "RelayWriter"):  # torch.distributed.checkpoint takes as long to import as torch
        return getattr(importlib.import_module("keepstep_formats.torch_storage"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
