"""Live state from one process to another: a typed format without pickle, and the transports that move it."""

from __future__ import annotations

from keepstep.checkpointing.http_transport import HTTPTransport
from keepstep.checkpointing.pg_transport import PGTransport
from keepstep.checkpointing.relayed.relay_transport import RelayTransport
from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.state.errors import StateMismatch, TransferError, UnsupportedValue
from keepstep_mesh.errors import ManifestError

__all__ = [
    "CheckpointTransport",
    "HTTPTransport",
    "ManifestError",
    "PGTransport",
    "RelayTransport",
    "StateMismatch",
    "TransferError",
    "UnsupportedValue",
]
