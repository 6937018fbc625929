"""The contract of a store, in which lighthouses keep their state.

Keys are text, values are bytes, keys are ordered as text. Changes go through ``transact``: a set of comparisons and,
if all of them hold, a set of writes, all or none. A key written under a lease is deleted when the lease ends.

A call that changes something ends in one of three ways, and the caller must tell them apart:

* it returns: the change is made, durably;
* ``WriteFailedError``: no change was made;
* ``OutcomeUnknownError``: the change may have been made. Read the keys before anything depends on it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from keepstep_mesh.errors import KeepstepError


class StoreError(KeepstepError):
    """The store cannot be opened or read, or it is closed."""


class WriteFailedError(StoreError):
    """Nothing was written."""


class OutcomeUnknownError(StoreError):
    """Whether it was written is unknown. Read before continuing."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds if ``key`` has this value; ``None``: if the key is absent."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Write:
    """``value`` None deletes the key. ``lease``: the key is deleted when this lease ends (0: never)."""

    key: str
    value: bytes | None
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """The new value of a key; None: deleted."""

    key: str
    value: bytes | None


class Watch:
    """Changes of the keys that start with ``prefix``: first one for each existing key, then each later change.

    A watch reports states, not history: of a key that changes faster than it is read, only the last state. A slow
    reader therefore costs no more memory than the keys, and never misses the last state.
    Use as ``async with store.watch(prefix) as watch: async for change in watch``. The iteration ends when the store is
    closed, with a ``StoreError`` when it broke.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._pending: dict[str, Change] = {}
        self._wake = asyncio.Event()
        self.ended = False
        self._error: StoreError | None = None

    def tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.key.startswith(self.prefix):
                self._pending.pop(change.key, None)
                self._pending[change.key] = change
                self._wake.set()

    def end(self, error: StoreError | None = None) -> None:
        self.ended = True
        self._error = error
        self._wake.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    async def __aiter__(self) -> AsyncIterator[Change]:
        while True:
            while self._pending:
                yield self._pending.pop(next(iter(self._pending)))
            if self._error is not None:
                raise self._error
            if self.ended:
                return
            self._wake.clear()
            await self._wake.wait()


class Store(ABC):
    """Used from one event loop. Every method may raise ``StoreError`` with the reason."""

    exclusive = True
    """Whether only one process can use the store; it then leads without an election."""

    async def open(self) -> None:
        """Make the store usable; call it once, first. Raise ``StoreError`` if the store cannot be used."""
        return

    @abstractmethod
    async def get(self, key: str) -> bytes | None: ...

    @abstractmethod
    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with ``prefix``, in order, as of one moment."""

    @abstractmethod
    async def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        """Do all ``writes`` if all comparisons hold, else none. Return whether they held; the writes are then durable.

        Raises ``WriteFailedError`` (a lease that is over, among others) or ``OutcomeUnknownError``.
        """

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        await self.transact((), (Write(key, value, lease),))

    @abstractmethod
    async def grant_lease(self, ttl: float) -> int:
        """Grant a lease of ``ttl`` seconds from now and return its number, which is not 0."""

    @abstractmethod
    async def keep_alive(self, lease: int) -> None:
        """Restart the lease. Raise ``WriteFailedError`` if it has expired."""

    @abstractmethod
    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys. No error if it has expired."""

    @abstractmethod
    def watch(self, prefix: str) -> Watch: ...

    @abstractmethod
    async def close(self) -> None:
        """End watches and free resources. Leases continue if the store outlives the process."""
