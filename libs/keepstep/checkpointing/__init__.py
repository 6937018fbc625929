"""Transports of live state, under the names of torchft: the faces of ``keepstep.transfer``."""

from __future__ import annotations

from keepstep.checkpointing.http_transport import HTTPTransport
from keepstep.checkpointing.pg_transport import PGTransport
from keepstep.checkpointing.relay_transport import RelayTransport
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
