"""The services that workers may need (relays, metrics): leased records in the store, and this lighthouse's copy.

A service puts its record under a lease and repeats that before the lease ends; a record that is not repeated goes by
itself. The store is the truth: what this lighthouse answers and tells its workers is what it sees there, so every
lighthouse on that store knows the same. Records are written under the term that asks, compared with its epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from keepstep_lighthouse.leadership.term import EPOCH_KEY, STORE_TIMEOUT, TermOverError
from keepstep_lighthouse.registry import service_records
from keepstep_lighthouse.registry.service_records import PREFIX, ServiceRecord
from keepstep_lighthouse.store.contract import Change, Compare, Store, StoreError, Write, WriteFailedError
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.protocol.messages import Detail, ServiceAddress

MAX_SERVICES = 1000
FOLLOW_AGAIN_SECONDS = 1.0

log = get_logger("keepstep.lighthouse.registry")


class RegistryFullError(StoreError):
    """The limit of ``MAX_SERVICES`` is reached."""


class Registry:
    """``on_change`` is called when the addresses that workers get have changed."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._store: Store
        self._records: dict[str, ServiceRecord] = {}
        self._leases: dict[str, int] = {}
        """Leases of the records that were written here, by key."""
        self._turn = asyncio.Lock()

    @property
    def records(self) -> tuple[ServiceRecord, ...]:
        """Sorted by kind and name."""
        return tuple(record for _, record in sorted(self._records.items()))

    def addresses(self) -> tuple[ServiceAddress, ...]:
        return tuple(record.as_address for record in self.records)

    def addresses_by_kind(self) -> dict[str, list[str]]:
        """Return the addresses of all services of each kind."""
        found: dict[str, list[str]] = {}
        for record in self.records:
            found.setdefault(record.kind, []).append(record.address)
        return found

    def term_begins(self) -> None:
        """Drop leases of an earlier term: another leader may have written the records since then, under its own."""
        self._leases.clear()

    # ---- orders

    async def put(self, epoch: int, record: ServiceRecord) -> ServiceRecord:
        """Store ``record`` for its time to live and return it as stored (``since``: of the first registration).

        Raises ``StoreError``, ``TermOverError`` or ``TimeoutError``: then it may or may not be kept; repeat it.
        """
        async with asyncio.timeout(STORE_TIMEOUT), self._turn:
            known = self._records.get(record.key)
            if known is not None and known.address == record.address:
                record = replace(record, since=known.since)
            if record != known or not await self._renewed(record.key):
                if known is None and len(self._records) >= MAX_SERVICES:
                    raise RegistryFullError(f"too many services (limit {MAX_SERVICES})")
                await self._write(epoch, record)
            return record

    async def delete(self, epoch: int, kind: str, name: str) -> None:
        """Delete a record, if it exists. Raise the errors of ``put``."""
        key = service_records.key_of(kind, name)
        async with asyncio.timeout(STORE_TIMEOUT), self._turn:
            await self._transact(epoch, Write(key, None))
            lease = self._leases.pop(key, None)
            self._see(Change(key, None))
            if lease is not None:
                await self._store.revoke(lease)

    async def _renewed(self, key: str) -> bool:
        """Renew the lease of a record. Return False if this lighthouse has no lease of it."""
        lease = self._leases.get(key)
        if lease is None:
            return False
        try:
            await self._store.keep_alive(lease)
        except WriteFailedError:
            return False
        return True

    async def _write(self, epoch: int, record: ServiceRecord) -> None:
        lease, value = await self._store.grant_lease(record.ttl_seconds), service_records.encode(record)
        try:
            await self._transact(epoch, Write(record.key, value, lease))
        except TermOverError:
            await self._store.revoke(lease)
            raise
        before = self._leases.get(record.key)
        self._leases[record.key] = lease
        self._see(Change(record.key, value))
        if before is not None:
            await self._store.revoke(before)

    async def _transact(self, epoch: int, write: Write) -> None:
        if not await self._store.transact((Compare(EPOCH_KEY, b"%d" % epoch),), (write,)):
            raise TermOverError("another term has begun; retry")

    # ---- what the store holds

    @contextlib.asynccontextmanager
    async def following(self, store: Store) -> AsyncIterator[None]:
        """Keep the copy equal to ``store``."""
        self._store = store
        follower = asyncio.create_task(self._follow(), name="keepstep lighthouse registry")
        try:
            yield
        finally:
            await cancelled(follower)

    async def _follow(self) -> None:
        failures_logged = LogLimiter(max_keys=4)
        while True:
            try:
                async with self._store.watch(PREFIX) as watch:
                    async with asyncio.timeout(STORE_TIMEOUT):
                        self._see_all(await self._store.get_prefix(PREFIX))
                    async for change in watch:
                        self._see(change)
            except (StoreError, TimeoutError) as error:
                reason = str(error) or "the store does not answer"
                if failures_logged.allows(time.monotonic(), reason):
                    log.warning("cannot follow the services in the store; the last known ones are kept", reason=reason)
            await asyncio.sleep(FOLLOW_AGAIN_SECONDS)

    def _see_all(self, found: Mapping[str, bytes]) -> None:
        """Drop services that were deleted while the watch was broken; the watch reports the others."""
        for key in [key for key in self._records if key not in found]:
            self._see(Change(key, None))

    def _see(self, change: Change) -> None:
        before = self._records.get(change.key)
        after = None
        try:
            after = None if change.value is None else service_records.decode(change.key, change.value)
        except StoreError as error:
            log.error("invalid service in the store is ignored", reason=str(error))
        if after is None:
            self._records.pop(change.key, None)
            self._leases.pop(change.key, None)
        else:
            self._records[change.key] = after
        if (before and before.as_address) != (after and after.as_address):
            said = "service gone" if after is None else "service registered"
            log.info(said, service=change.key.removeprefix(PREFIX), address=after.address if after else None)
            self._on_change()


def new_record(kind: str, name: str, address: str, ttl_seconds: float, details: dict[str, Detail]) -> ServiceRecord:
    """Return a record that is registered now."""
    return ServiceRecord(kind, name, address, float(ttl_seconds), time.time(), details)
