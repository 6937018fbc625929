"""State that the request handlers of one relay share: its core, its tiers, and limits on waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from keepstep_mesh.discovery.registration import Registrar
from keepstep_mesh.net.http import Problem
from keepstep_relay.checkpoint_store import CheckpointStore
from keepstep_relay.core.events import Key, UploadEnded
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.settings import RelaySettings
from keepstep_relay.tiers.disk_tier import DiskTier
from keepstep_relay.tiers.durable_tier import DurableTier
from keepstep_relay.torch_view.kept_directories import KeptDirectories

MAX_WAITS = 10_000
MAX_MANIFESTS_COMING = 8
"""Concurrent uploads of manifests, which may be large and are not yet counted in the memory tier."""
RETRY_AFTER_SECONDS = 1.0
"""Value of ``Retry-After``."""


@dataclass(slots=True)
class Traffic:
    """Counters of traffic."""

    received_bytes: int = 0
    sent_bytes: int = 0
    deduplicated_bytes: int = 0
    """Bytes of chunks that an upload named and that were already here."""
    uploads: int = 0
    """Uploads of chunks in progress."""
    downloads: int = 0
    """Downloads in progress."""
    cut_off: int = 0
    """Connections closed because the peer was too slow."""
    failed_durable_uploads: int = 0
    """Uploads of durable checkpoints that ended without a commit."""


class RelayNode:
    """One relay without its server. ``on_upload``: as for ``CheckpointStore``."""

    def __init__(self, settings: RelaySettings, on_upload: Callable[[UploadEnded, float], None]) -> None:
        self.settings = settings
        self.core = RelayCore(settings.limits)
        disk = None if settings.data_dir is None else DiskTier(settings.data_dir)
        durable = None if settings.durable is None else DurableTier(settings.durable)
        self.directories = KeptDirectories(lambda size: self.chunks.memory.release(size))  # noqa: PLW0108 - set below
        self.checkpoints = CheckpointStore(
            *(self.core, settings.memory, disk, durable, on_upload),
            on_forget=self.directories.drop,
            durable_in_memory=settings.memory_checkpoints > 0,
        )
        self.chunks = self.checkpoints.chunks
        self.traffic = Traffic()
        self.processes = 1
        """Processes that serve the port now."""
        self.registrar: Registrar | None = None
        self._manifests_coming = 0

    def not_ready(self) -> str | None:
        """Return why this relay cannot store all that it should; None: it can. It still serves what it has."""
        return self.chunks.disk_trouble or self.chunks.tried_disk or self.checkpoints.copies.trouble

    @property
    def is_registered(self) -> bool:
        return self.registrar is not None and self.registrar.lighthouse is not None

    async def has_manifest(self, key: Key, rank: int, seconds: float) -> None:
        """Wait for a manifest; its checkpoint need not have begun. ``Problem`` if it does not arrive in time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while (key, rank) not in self.checkpoints.manifests:
            one = self.core.checkpoints.get(key)
            if one is not None and not rank < one.facts.ranks:
                raise Problem(HTTPStatus.NOT_FOUND, f"{key} has no rank {rank}: expected 0 to {one.facts.ranks - 1}")
            if one is None and (key in self.core.ended or not seconds):
                self.core.checkpoint(key)
            self.check_waits()
            try:
                await self.chunks.notifier.wait(key, deadline)
            except TimeoutError:
                if key not in self.core.checkpoints:
                    raise Problem(HTTPStatus.NOT_FOUND, f"{key} not found within {seconds:g} s") from None
                raise Problem(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"missing manifest of rank {rank} of {key} after {seconds:g} s; retry",
                    retry_after=RETRY_AFTER_SECONDS,
                ) from None

    def check_waits(self) -> None:
        if self.chunks.notifier.waiters >= MAX_WAITS:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"too many waiting requests (limit {MAX_WAITS}); retry",
                retry_after=RETRY_AFTER_SECONDS,
            )

    def take_manifest_slot(self) -> None:
        if self._manifests_coming >= MAX_MANIFESTS_COMING:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"too many uploads of manifests (limit {MAX_MANIFESTS_COMING}); retry",
                retry_after=RETRY_AFTER_SECONDS,
            )
        self._manifests_coming += 1

    def give_manifest_slot(self) -> None:
        self._manifests_coming -= 1
