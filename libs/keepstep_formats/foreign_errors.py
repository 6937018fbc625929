"""Errors of checkpoints that other programs wrote, or shall read."""

from __future__ import annotations

from keepstep.state.errors import UnsupportedValue
from keepstep_mesh.errors import KeepstepError


class ForeignCheckpointError(KeepstepError):
    """A file of another program is damaged, hostile, or not supported. The message names the file and the item."""


class RefusedClass(ForeignCheckpointError):
    """A pickle names a class or function that is not allowed. It was not imported, and did not run."""


class CannotHold(ForeignCheckpointError, UnsupportedValue):
    """The format cannot hold a value of the state. The message names its path."""
