"""The lighthouses that share a store: each has a leased record there and reads those of the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from keepstep_lighthouse.leadership.term import STORE_TIMEOUT
from keepstep_lighthouse.store.contract import Change, Store, StoreError, Write
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger

PREFIX = "lighthouses/"
NODES_WATCH_RETRY_SECONDS = 1.0

log = get_logger("keepstep.lighthouse")


class Nodes:
    """``node``: name of this process. ``address``: where others reach it. ``lease``: seconds, of its record."""

    def __init__(self, store: Store, node: str, address: str, lease: float) -> None:
        self.addresses: dict[str, str] = {node: address}
        """By node."""
        self._store = store
        self._node = node
        self._address = address
        self._ttl = lease
        self._lease = 0

    async def run(self) -> None:
        """Keep the record until cancelled, then remove it."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._stay())
                group.create_task(self._follow())
        finally:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(STORE_TIMEOUT / 4):
                    await self._store.revoke(self._lease)

    async def _stay(self) -> None:
        while True:
            try:
                async with asyncio.timeout(STORE_TIMEOUT):
                    self._lease = await self._store.grant_lease(self._ttl)
                    value = json.dumps({"address": self._address}).encode()
                    await self._store.transact((), (Write(PREFIX + self._node, value, self._lease),))
                while True:
                    await asyncio.sleep(self._ttl / 3)
                    async with asyncio.timeout(STORE_TIMEOUT):
                        await self._store.keep_alive(self._lease)
            except (StoreError, TimeoutError) as error:
                log.debug("this lighthouse is not on record", reason=str(error) or "the store does not answer")
            await asyncio.sleep(NODES_WATCH_RETRY_SECONDS)

    async def _follow(self) -> None:
        failures_logged = LogLimiter(max_keys=4)
        while True:
            try:
                async with self._store.watch(PREFIX) as watch:
                    async for change in watch:
                        self._see(change)
            except StoreError as error:
                if failures_logged.allows(time.monotonic(), str(error)):
                    log.warning("other lighthouses are not followed; retrying", reason=str(error))
            await asyncio.sleep(NODES_WATCH_RETRY_SECONDS)

    def _see(self, change: Change) -> None:
        node = change.key.removeprefix(PREFIX)
        if change.value is None:
            if node != self._node:
                self.addresses.pop(node, None)
            return
        try:
            self.addresses[node] = str(json.loads(change.value)["address"])
        except (ValueError, KeyError, TypeError) as error:
            log.error("a lighthouse is left out", key=change.key, reason=repr(error))
