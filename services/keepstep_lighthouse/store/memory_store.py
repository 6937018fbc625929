"""A store in the memory of one process. ``sqlite_store.py`` adds a file to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from keepstep_lighthouse.store.contract import Change, Compare, Store, StoreError, Watch, Write, WriteFailedError


class MemoryStore(Store):
    """Keys, leases and watches."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lease_of: dict[str, int] = {}
        self._leases: dict[int, float] = {}
        """Time to live in seconds, by number."""
        self._ends: dict[int, asyncio.TimerHandle] = {}
        self._last_lease = 0
        self._watches: set[Watch] = set()
        self._closed = False

    # ---- reads

    async def get(self, key: str) -> bytes | None:
        self._check_open()
        return self._values.get(key)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        self._check_open()
        return {key: self._values[key] for key in sorted(self._values) if key.startswith(prefix)}

    def watch(self, prefix: str) -> Watch:
        self._check_open()
        watch = Watch(prefix)
        watch.tell(Change(key, self._values[key]) for key in sorted(self._values))
        self._watches = {one for one in self._watches if not one.ended} | {watch}
        return watch

    # ---- writes

    async def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        self._check_open()
        if not self._allowed(compare, writes):
            return False
        self._apply(writes)
        return True

    def _allowed(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        for write in writes:
            if write.lease and write.lease not in self._leases:
                raise WriteFailedError(f"{write.key} was not written: its lease has expired")
        return all(self._values.get(one.key) == one.value for one in compare)

    def _apply(self, writes: Sequence[Write]) -> None:
        changes = []
        for write in writes:
            existed = write.key in self._values
            self._lease_of.pop(write.key, None)
            # If the lease ended during the write to disk, this key is deleted too.
            value = write.value if not write.lease or write.lease in self._leases else None
            if value is None:
                self._values.pop(write.key, None)
            else:
                self._values[write.key] = value
                if write.lease:
                    self._lease_of[write.key] = write.lease
            if existed or value is not None:
                changes.append(Change(write.key, value))
        for watch in self._watches:
            watch.tell(changes)

    # ---- leases

    async def grant_lease(self, ttl: float) -> int:
        self._check_open()
        self._last_lease += 1
        self._start_lease(self._last_lease, ttl)
        return self._last_lease

    async def keep_alive(self, lease: int) -> None:
        self._check_open()
        if lease not in self._leases:
            raise WriteFailedError(f"lease {lease} has expired")
        self._start_lease(lease, self._leases[lease])

    async def revoke(self, lease: int) -> None:
        await self.transact((), self._end_of(lease))
        self._forget(lease)

    def _start_lease(self, lease: int, ttl: float) -> None:
        self._forget(lease)
        self._leases[lease] = ttl
        self._ends[lease] = asyncio.get_running_loop().call_later(ttl, self._expire, lease)

    def _expire(self, lease: int) -> None:
        self._forget(lease)
        self._apply(self._end_of(lease))

    def _end_of(self, lease: int) -> list[Write]:
        return [Write(key, None) for key, owner in self._lease_of.items() if owner == lease]

    def _forget(self, lease: int) -> None:
        self._leases.pop(lease, None)
        if timer := self._ends.pop(lease, None):
            timer.cancel()

    # ---- the end

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    async def close(self) -> None:
        self._closed = True
        for timer in self._ends.values():
            timer.cancel()
        for watch in self._watches:
            watch.end()
