"""The Store contract: what a lighthouse needs of the place where its membership is kept.

Keys are text, values are bytes, keys are ordered as text. What changes goes through ``transact``: a set of
comparisons and, if all of them hold, a set of writes, all or none. A key written under a lease goes when that ends.

A call that changes something ends in one of three ways, and the caller must tell them apart:

* it returns: what it says has happened, durably;
* ``WriteFailedError``: nothing has happened;
* ``OutcomeUnknownError``: it may or may not have happened. Nothing may be built on it before the keys were read again.
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
    """The store cannot do its work: it cannot be opened or read, or it is closed."""


class WriteFailedError(StoreError):
    """Nothing was written."""


class OutcomeUnknownError(StoreError):
    """Whether it was written is not known. Read before going on."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds when ``key`` has this very value; ``None``: when the key is absent."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Write:
    """``value`` None deletes the key. ``lease``: the key goes when this lease ends (0: it stays)."""

    key: str
    value: bytes | None
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """What a key holds now; ``value`` None: it is gone."""

    key: str
    value: bytes | None


class Watch:
    """Changes of the keys that start with ``prefix``: first one for each key there is, then what happens.

    It tells states, not history: of a key that changes faster than it is read only the last state is told, so a reader
    that is slow costs no more memory than the keys do, and the last state is never missed.
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
    """Whether nobody else uses what this store keeps: then its user leads without an election."""

    @abstractmethod
    async def get(self, key: str) -> bytes | None: ...

    @abstractmethod
    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """All keys that start with ``prefix``, in order, as they were at one moment."""

    @abstractmethod
    async def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        """Does all ``writes`` if all comparisons hold, else none. True: they held and it is durable.

        Raises ``WriteFailedError`` (a lease that is over, among others) or ``OutcomeUnknownError``.
        """

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        await self.transact((), (Write(key, value, lease),))

    @abstractmethod
    async def grant_lease(self, ttl: float) -> int:
        """A lease of ``ttl`` seconds from now; its number is not 0."""

    @abstractmethod
    async def keep_alive(self, lease: int) -> None:
        """Its full time again from now. Raises ``WriteFailedError`` when the lease is over."""

    @abstractmethod
    async def revoke(self, lease: int) -> None:
        """Ends the lease and deletes its keys. A lease that is over is no error."""

    @abstractmethod
    def watch(self, prefix: str) -> Watch: ...

    @abstractmethod
    async def close(self) -> None:
        """Ends watches and frees what the store holds. Leases go on where the store outlives the process."""
