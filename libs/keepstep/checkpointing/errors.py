"""What can go wrong with a state: it cannot be stored, what arrived cannot be trusted, or it did not arrive."""

from __future__ import annotations

from keepstep_mesh.errors import KeepstepError


class UnsupportedValue(KeepstepError, TypeError):
    """The state holds a value that the format has no type for. The message names its path."""


class TransferError(KeepstepError):
    """A state was not received completely.

    ``torn`` is true when bytes may already have been written into the tensors of ``into``: their content is undefined
    until a later transfer into them succeeds. Without ``into`` nothing of the caller's was touched.
    """

    def __init__(self, message: str, *, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class TransferTimeout(TransferError, TimeoutError):
    """A state was not received in time."""
