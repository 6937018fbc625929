"""Live state from one process to another: a typed format without pickle, and the transports that move it."""

from __future__ import annotations

from keepstep.checkpointing.errors import TransferError, UnsupportedValue
from keepstep.checkpointing.http import HTTPTransport
from keepstep.checkpointing.pg import PGTransport
from keepstep.checkpointing.relay import RelayTransport
from keepstep.checkpointing.transport import CheckpointTransport
from keepstep_mesh.errors import ManifestError

__all__ = [
    "CheckpointTransport",
    "HTTPTransport",
    "ManifestError",
    "PGTransport",
    "RelayTransport",
    "TransferError",
    "UnsupportedValue",
]
