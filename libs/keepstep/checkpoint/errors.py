"""Errors of durable checkpoints."""

from __future__ import annotations

from keepstep_mesh.errors import KeepstepError


class CheckpointError(KeepstepError):
    """A checkpoint was not saved, or not loaded."""


class CheckpointAborted(CheckpointError):
    """The checkpoint was not committed: a rank failed or was lost. The previous checkpoint is intact."""


class CheckpointNotFound(CheckpointError):
    """No committed checkpoint has that name."""


class CheckpointDamaged(CheckpointError):
    """Stored bytes differ from the digests that were computed when they were saved."""


class MissingKeys(CheckpointError, KeyError):
    """The checkpoint does not have what the load asks for.

    Attributes:
        missing: keys that were asked for, and that the checkpoint does not have.
        available: keys of the checkpoint.
    """

    def __init__(self, message: str, missing: tuple[str, ...], available: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing = missing
        self.available = available

    __str__ = Exception.__str__
