"""Errors of a state that cannot be stored, was not received, or was not saved or loaded as a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.text import listed

MAX_NAMED = 10
AFTER_GOING_BACK = (
    "If the job went back to an earlier step and trains this one again, put the number of times that it went back into "
    "the name, or delete the abandoned checkpoint first"
)
"""For the error of a save to a name that has a checkpoint."""


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


class StatesMissing(StateMismatch):
    """The source has named states that this group does not have yet. Its script may register them later."""


class StateDamaged(TransferError):
    """No relay can send the state: chunks of it are damaged or missing at each of them."""


class TransferTimeout(TransferError, TimeoutError):
    """A state was not received in time."""


class CheckpointError(KeepstepError):
    """A checkpoint was not saved, or not loaded."""


class CollidingKeys(CheckpointError, UnsupportedValue):
    """Two values of a state would get the same key in the checkpoint. The message names it."""


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

    def __init__(self, message: str, missing: tuple[str, ...] = (), available: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing
        self.available = available

    __str__ = Exception.__str__


def without_keys(missing: Sequence[str], available: Sequence[str]) -> str:
    """Return which keys a checkpoint does not have, and which of its keys are similar to the first one."""
    close = difflib.get_close_matches(missing[0], available[:10_000], n=3)
    there = f"similar keys: {', '.join(close)}" if close else f"it has {listed(available, MAX_NAMED) or 'nothing'}"
    return f"the checkpoint does not have {listed(missing, MAX_NAMED)}; {there} ({len(available)} keys in all)"
