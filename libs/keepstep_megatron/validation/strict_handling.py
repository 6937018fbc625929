"""Keys that only the checkpoint has, or only the requested state: what a load does about them. Pure.

*Unexpected* keys are requested, but not in the checkpoint. *Missing* keys are in the checkpoint, but no rank requests
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from keepstep_mesh.text import listed

MAX_NAMED = 10


class StrictHandling(Enum):
    """Reaction of a load to keys that only the checkpoint or only the requested state has.

    Those that end with ``_ALL`` need the keys of all ranks; the others ignore missing keys.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Do not compare keys before the load; the load fails on an unexpected key."""
    LOG_UNEXPECTED = "log_unexpected"
    """Log unexpected keys at level warning, and leave them out."""
    LOG_ALL = "log_all"
    """Log unexpected and missing keys at level warning, and leave the unexpected ones out."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Raise an error that names unexpected keys, before anything is loaded."""
    RAISE_ALL = "raise_all"
    """Raise an error that names unexpected and missing keys, before anything is loaded."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Leave unexpected keys out, and return them."""
    RETURN_ALL = "return_all"
    """Leave unexpected keys out, and return them and the missing ones."""
    IGNORE_ALL = "ignore_all"
    """Leave unexpected keys out, and say nothing."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether the load compares keys with those of the checkpoint first."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether the load needs the keys of all ranks."""
        return val in _ALL or val is StrictHandling.IGNORE_ALL

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether the load returns missing and unexpected keys beside the state."""
        return val in _RETURN


_ALL = (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)
_RETURN = (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)
_RAISE = (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
_LOG = (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the member of ``StrictHandling`` with that value.

    Args:
        strict: a value, such as ``"raise_all"``, or a member.

    Raises:
        ValueError: no member has that value.
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        allowed = ", ".join(one.value for one in StrictHandling)
        raise ValueError(f"Invalid strict flag {strict!r}: expected one of {allowed}") from None


@dataclass(frozen=True)
class KeyMismatch:
    """Keys that only one side has, and what the load does about them."""

    missing: frozenset[str] = frozenset()
    """In the checkpoint, and requested by no rank."""
    unexpected: frozenset[str] = frozenset()
    """Requested, and not in the checkpoint: the load leaves them out."""
    error: str = ""
    """The load must raise this; empty: it goes on."""
    warning: str = ""
    """The load must log this; empty: nothing."""


def compare_keys(
    strict: StrictHandling, stored: Collection[str], requested: Iterable[str], requested_by_all: Iterable[str]
) -> KeyMismatch:
    """Decide what a load does about keys that only one side has.

    If every rank passes the same ``requested_by_all``, every rank has the same ``error``.

    Args:
        strict: as the caller of the load chose.
        stored: keys of the checkpoint.
        requested: keys that this rank requests.
        requested_by_all: keys that any rank requests, if the ranks have exchanged them; else those of this rank.
    """
    if strict is StrictHandling.ASSUME_OK_UNEXPECTED:
        return KeyMismatch()
    known, everyone = frozenset(stored), frozenset(requested_by_all)
    unexpected, of_all = frozenset(requested) - known, everyone - known
    missing = known - everyone if strict in _ALL else frozenset[str]()
    raised = described(missing, of_all) if strict in _RAISE else ""
    logged = described(missing, unexpected) if strict in _LOG else ""
    return KeyMismatch(missing, unexpected, raised, logged)


def described(missing: AbstractSet[str], unexpected: AbstractSet[str]) -> str:
    """Return the keys that only one side has, for an error; empty: none."""
    parts = []
    if unexpected:
        parts.append(f"Unexpected keys, which the checkpoint does not have: {listed(sorted(unexpected), MAX_NAMED)}")
    if missing:
        parts.append(f"Missing keys, which no rank requests: {listed(sorted(missing), MAX_NAMED)}")
    return "; ".join(parts)
