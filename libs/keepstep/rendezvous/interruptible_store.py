"""The interface of stores whose waits another thread can end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

UNKNOWN_VERSION = 0
"""Version of a rendezvous whose members do not know those of the others."""


class InterruptibleStore(Store):
    """A store of torch whose waits have a limit, and end when another thread calls ``abort``."""

    host: str
    """Name or address of the store's host."""
    version: int
    """Lowest version of the rendezvous that all members support, or ``UNKNOWN_VERSION``."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make current waits and all later calls raise an error with ``reason``."""
