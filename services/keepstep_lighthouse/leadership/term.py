"""A lighthouse's term: its epoch, and writes that happen only while the store still says so.

Beginning a term raises the epoch in the store by compare-and-swap, so that each epoch has one owner. Every write of the
term compares the epoch, the leader's key if the store is shared, and the earlier writes of the term. A write that does
not hold ends the term (``TermOverError``), and the owner of an ended term makes no more decisions. So does, in a
store of one lighthouse, a write that fails, hangs, or has an unknown outcome; a leader among several has time until its
lease ends: it reads back what became of the write, and tries again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from keepstep_lighthouse.store.contract import Compare, OutcomeUnknownError, Store, StoreError, Write
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.backoff import Backoff

EPOCH_KEY = "epoch"
STORE_TIMEOUT = 10.0
"""The outcome of a write that takes longer is unknown."""
WRITE_BACKOFF = Backoff(first=0.05, most=1.0)

log = get_logger("keepstep.lighthouse")


class TermOverError(KeepstepError):
    """The term is over: this lighthouse may not decide under it."""


class Term:
    """A term, begun by ``begin`` or by the election. ``epoch`` only grows.

    Args:
        leader: the leader's key and its value during this term; None: the store is not shared.
        until: gives the monotonic time at which the lease ends; None: never.
        fenced_until: until then a deposed leader may still confirm the quorum that it wrote, unless one of its members
            connects here.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        leader: Compare | None = None,
        until: Callable[[], float] | None = None,
        fenced_until: float = 0.0,
    ) -> None:
        self.epoch = epoch
        self.fenced_until = fenced_until
        self.trouble: str | None = None
        """Why a write that is tried again has failed; None: no write waits."""
        self._store = store
        self._leader = leader
        self._until = until
        self._one_write = asyncio.Lock()

    @property
    def lapsed(self) -> bool:
        """Whether the lease is over by our own clock, even if the election has not noticed it yet (after a stall)."""
        return self._until is not None and time.monotonic() >= self._until()

    @classmethod
    async def begin(cls, store: Store) -> Term:
        """Begin a term in a store that only this lighthouse uses. Raise ``StoreError`` if the store fails."""
        while True:
            stored = await store.get(EPOCH_KEY)
            epoch = parse_epoch(stored) + 1
            if await store.transact((Compare(EPOCH_KEY, stored),), (Write(EPOCH_KEY, b"%d" % epoch),)):
                return cls(store, epoch)

    async def replace(self, key: str, before: bytes | None, after: bytes | None, lease: int = 0) -> None:
        """Write ``after`` if the key holds ``before``. ``after`` None deletes."""
        await self.change((Compare(key, before),), (Write(key, after, lease),))

    async def change(self, compare: Sequence[Compare], writes: Sequence[Write]) -> None:
        """Do all of ``writes`` if all of ``compare`` holds."""
        async with self._one_write:
            await self._write(compare, writes)

    async def raise_epoch(self, seen: int) -> bool:
        """Raise the epoch above ``seen``, which a worker reported. Return False if it is above already."""
        async with self._one_write:
            if self.epoch > seen:
                return False
            await self._write((), (Write(EPOCH_KEY, b"%d" % (seen + 1)),))
            self.epoch = seen + 1
            return True

    async def _write(self, compare: Sequence[Compare], writes: Sequence[Write]) -> None:
        try:
            await self._write_until_over(compare, writes)
        finally:
            self.trouble = None

    async def _write_until_over(self, compare: Sequence[Compare], writes: Sequence[Write]) -> None:
        leader = () if self._leader is None else (self._leader,)
        mine = (Compare(EPOCH_KEY, b"%d" % self.epoch), *leader)
        written = {write.key: write.value for write in writes}
        done = [one for one in mine if one.key not in written]
        done += [Compare(key, value) for key, value in written.items()]
        unknown, failures = False, 0
        while True:
            try:
                async with asyncio.timeout(STORE_TIMEOUT):
                    if unknown and await self._store.transact(done, ()):
                        return
                    if await self._store.transact((*mine, *compare), writes):
                        return
                    # the lost write may have arrived between the two
                    if unknown and await self._store.transact(done, ()):
                        return
                raise TermOverError("another process changed the store")
            except (StoreError, TimeoutError) as error:
                unknown = unknown or isinstance(error, OutcomeUnknownError | TimeoutError)
                reason = str(error) or f"the store did not answer a write for {STORE_TIMEOUT:g} s"
                failures += 1
                pause = WRITE_BACKOFF.seconds(failures)
                if self._until is None or time.monotonic() + pause >= self._until():
                    raise TermOverError(reason) from error
                self.trouble = f"a write to the store waits: {reason}"
                log.warning("write to the store failed; retrying", keys=[*written], reason=reason)
            await asyncio.sleep(pause)


def parse_epoch(stored: bytes | None) -> int:
    """Decode an epoch. Raise ``StoreError`` if it is invalid."""
    try:
        return int(stored or b"0")
    except ValueError as error:
        raise StoreError(f"{EPOCH_KEY} in the store is {stored!r} and no number; restore it") from error
