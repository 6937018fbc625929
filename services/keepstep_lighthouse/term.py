"""A lighthouse's term: its epoch, and writes that happen only while the store still says so.

Beginning a term raises the epoch in the store by compare-and-swap, so that each epoch has one owner. Every write of the
term compares the epoch, and what the term itself wrote before. A write that does not hold, fails, hangs, or has an
unknown outcome ends the term (``TermOverError``): whoever holds a Term that is over decides nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from keepstep_lighthouse.store import Compare, Store, StoreError, Write
from keepstep_mesh.errors import KeepstepError

EPOCH_KEY = "epoch"
STORE_TIMEOUT = 10.0
"""A store that takes longer has no outcome."""


class TermOverError(KeepstepError):
    """This lighthouse may not decide any more under this term."""


class Term:
    """Made by ``begin``. ``epoch`` only grows."""

    def __init__(self, store: Store, epoch: int) -> None:
        self.epoch = epoch
        self._store = store
        self._one_write = asyncio.Lock()

    @classmethod
    async def begin(cls, store: Store) -> Term:
        """Raises ``StoreError`` when the store does not do it."""
        while True:
            stored = await store.get(EPOCH_KEY)
            epoch = _epoch(stored) + 1
            if await store.transact((Compare(EPOCH_KEY, stored),), (Write(EPOCH_KEY, b"%d" % epoch),)):
                return cls(store, epoch)

    async def replace(self, key: str, before: bytes | None, after: bytes) -> None:
        """Writes ``after`` where ``before`` stood."""
        async with self._one_write:
            await self._write((Compare(key, before),), (Write(key, after),))

    async def raise_epoch(self, seen: int) -> None:
        """Raises the epoch above ``seen``, which a worker met."""
        async with self._one_write:
            if self.epoch <= seen:
                await self._write((), (Write(EPOCH_KEY, b"%d" % (seen + 1)),))
                self.epoch = seen + 1

    async def _write(self, compare: Sequence[Compare], writes: Sequence[Write]) -> None:
        mine = Compare(EPOCH_KEY, b"%d" % self.epoch)
        try:
            async with asyncio.timeout(STORE_TIMEOUT):
                held = await self._store.transact((mine, *compare), writes)
        except StoreError as error:
            raise TermOverError(str(error)) from error
        except TimeoutError:
            raise TermOverError(f"the store did not answer a write for {STORE_TIMEOUT:g} s") from None
        if not held:
            raise TermOverError("the store was changed by somebody else")


def _epoch(stored: bytes | None) -> int:
    try:
        return int(stored or b"0")
    except ValueError as error:
        raise StoreError(f"{EPOCH_KEY} in the store is {stored!r} and no number; restore it") from error
