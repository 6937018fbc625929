"""Errors of a state that cannot be stored, or was not received."""

from __future__ import annotations

from keepstep_mesh.errors import KeepstepError


class UnsupportedValue(KeepstepError, TypeError):
    """The state has a value of a type that the format cannot store. The message names its path."""


class TransferError(KeepstepError):
    """A state was not received completely.

    Attributes:
        torn: whether the tensors of ``into`` may be half written. Their content is undefined then, until a later
            transfer into them succeeds.
    """

    def __init__(self, message: str, *, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class StateMismatch(TransferError):
    """The state of the source cannot be sent, or does not fit this group. Another transfer would fail as well."""


class StateDamaged(TransferError):
    """No relay can send the state: chunks of it are damaged or missing at each of them."""


class TransferTimeout(TransferError, TimeoutError):
    """A state was not received in time."""
