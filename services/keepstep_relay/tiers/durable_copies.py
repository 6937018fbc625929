"""Copies of committed durable checkpoints in the durable tier, which follows the relay in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.backoff import Backoff
from keepstep_relay.core.checkpoint import Checkpoint
from keepstep_relay.core.events import Key, Kind
from keepstep_relay.tiers.chunks import ChunkStore, GoneError
from keepstep_relay.tiers.disk_tier import Record
from keepstep_relay.tiers.durable_tier import DurableError

DURABLE_WRITE_ATTEMPTS = 4
"""Attempts at one object before the copy fails."""
DURABLE_WRITE_BACKOFF = Backoff(first=0.2, most=2.0)
COPY_BACKOFF = Backoff(first=1.0, most=60.0)
"""After a copy or a deletion failed."""

log = get_logger("keepstep.relay.copies")


class DurableCopies:
    """``on_copied`` is called when the durable tier has all of a checkpoint."""

    def __init__(self, chunks: ChunkStore, on_copied: Callable[[Key], object]) -> None:
        self.complete: set[Key] = set()
        """Checkpoints that the durable tier has in full."""
        self.trouble: str | None = None
        """Why the durable tier is behind."""
        self.behind_since: float | None = None
        """Unix time of the first failure in a row; None: the durable tier is not behind."""
        self._chunks = chunks
        self._checkpoints: Mapping[Key, Checkpoint] = chunks.core.checkpoints
        self._on_copied = on_copied
        self._stored: set[Key] = set()
        """Checkpoints that the durable tier has in full or in part."""
        self._outdated: set[Key] = set()
        """Checkpoints whose copy in the durable tier is one of an earlier checkpoint."""
        self._to_follow: asyncio.Queue[Key] = asyncio.Queue()
        """Checkpoints to copy or to delete."""

    def follow(self, key: Key) -> None:
        """Copy or delete the checkpoint in the background, if that is still needed."""
        if self._chunks.durable is not None and key not in self.complete:
            self._to_follow.put_nowait(key)

    def found(self, key: Key) -> None:
        """Note that the durable tier has all of a checkpoint."""
        self._stored.add(key)
        self.complete.add(key)
        for one in self._before(key):
            self._to_follow.put_nowait(one)  # it was kept until now
        self._on_copied(key)

    def outdated(self, key: Key) -> None:
        """Note that the durable tier has an earlier checkpoint of this name, which could not be deleted."""
        self._stored.add(key)
        self._outdated.add(key)

    async def run(self, source: Callable[[Key], tuple[Record, dict[int, bytes]]]) -> None:
        """Copy and delete, one checkpoint at a time, until cancelled. A failure is logged and retried.

        Args:
            source: Returns the record of a committed checkpoint, and its manifests by rank.
        """
        while True:
            key, failures = await self._to_follow.get(), 0
            while True:
                one = self._checkpoints.get(key)
                try:
                    if one is None and self._may_delete(key):
                        await self._delete(key)
                    elif one is not None and one.committed_at is not None and key not in self.complete:
                        await self.copy(one, *source(key))
                    else:
                        break
                    self.trouble = self.behind_since = None
                except (KeepstepError, GoneError, TimeoutError) as error:
                    if self._checkpoints.get(key) is one:
                        failures += 1
                        pause = COPY_BACKOFF.seconds(failures)
                        self._fell_behind(key, error)
                        log.error(
                            "durable tier is behind; retrying",
                            job=key.job,
                            checkpoint=key.id,
                            reason=str(error),
                            retry_seconds=pause,
                        )
                        await asyncio.sleep(pause)

    def _fell_behind(self, key: Key, error: Exception) -> None:
        self.trouble = f"the durable tier is behind with {key}: {error}"
        self.behind_since = self.behind_since or time.time()

    async def copy(self, one: Checkpoint, record: Record, manifests: dict[int, bytes]) -> None:
        """Copy a checkpoint. Raises ``GoneError`` if it is dropped in the meantime, ``KeepstepError`` of the tiers."""
        durable, key = self._chunks.durable, one.key
        if durable is None:
            return
        async with self._chunks.locks((key, "durable")):
            if key in self._outdated:
                await self._write(durable.forget, key)
                self._outdated.discard(key)
            for digest in one.digests():
                self._check_exists(one)
                self._stored.add(key)
                async with self._chunks.reading(digest, 0.0) as data:
                    await self._write(durable.write_chunk, key, digest, data)
            self._check_exists(one)
            self._stored.add(key)
            await self._write(durable.commit, key, record, manifests)
            self._check_exists(one)
            self.found(key)
        self.trouble = self.behind_since = None
        log.info("copied to the durable tier", job=key.job, checkpoint=key.id, url=durable.url)

    async def _write(self, write: Callable[..., None], key: Key, *arguments: object) -> None:
        """Write to the durable tier, again after an error of a moment. Raises ``DurableError`` of the last attempt."""
        for failures in range(1, DURABLE_WRITE_ATTEMPTS + 1):
            try:
                return await self._chunks.in_thread(write, key, *arguments)
            except DurableError as error:
                if failures == DURABLE_WRITE_ATTEMPTS or key not in self._checkpoints:
                    self._fell_behind(key, error)
                    raise
                log.warning("durable tier failed; retrying", job=key.job, checkpoint=key.id, reason=str(error))
                await asyncio.sleep(DURABLE_WRITE_BACKOFF.seconds(failures))
        return None

    def _check_exists(self, one: Checkpoint) -> None:
        if self._checkpoints.get(one.key) is not one:
            raise GoneError(f"{one.key} was dropped during its copy to the durable tier")

    def on_forget(self, key: Key) -> None:
        """The core dropped a checkpoint. ``forget`` follows."""
        self.complete.discard(key)

    async def forget(self, key: Key) -> None:
        """Delete a dropped checkpoint from the durable tier, and what was kept until its copy was complete.

        Raises ``DurableError``; ``run`` then retries.
        """
        for one in (*self._before(key), key):
            try:
                await self._delete(one)
            except DurableError:
                self._to_follow.put_nowait(one)
                raise

    async def _delete(self, key: Key) -> None:
        async with self._chunks.locks((key, "durable")):
            if self._chunks.durable is not None and self._may_delete(key) and key not in self._checkpoints:
                await self._chunks.in_thread(self._chunks.durable.forget, key)
                self._stored.discard(key)

    def _before(self, key: Key) -> list[Key]:
        """Return the earlier versions that have a copy, the oldest first."""
        found = (one for one in self._stored if one.at(0) == key.at(0) and one.version < key.version)
        return sorted(found, key=lambda one: one.version)

    def _may_delete(self, key: Key) -> bool:
        """Whether a dropped checkpoint has a copy, and no later version of it still waits to be copied."""
        later = (one for one in self._chunks.core.versions(key) if one.key.version > key.version)
        return key in self._stored and not any(
            one.committed_at is not None and one.key not in self.complete and one.facts.kind is Kind.DURABLE
            for one in later
        )
