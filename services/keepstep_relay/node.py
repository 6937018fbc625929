"""What the request handlers of one relay share: its core, its tiers, and the limits on what waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus

from keepstep_mesh.discovery.registration import Registrar
from keepstep_mesh.net.http import Problem
from keepstep_relay.checkpoint_store import CheckpointStore
from keepstep_relay.core.events import Key
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.settings import RelaySettings
from keepstep_relay.tiers.chunks import ChunkStore

MAX_WAITS = 10_000
MAX_MANIFESTS_COMING = 8
"""Each may be large, and is not yet part of the memory tier."""
RETRY_AFTER_SECONDS = 1.0
"""Value of ``Retry-After``."""


@dataclass(slots=True)
class Traffic:
    """Counts of what came and went."""

    received_bytes: int = 0
    sent_bytes: int = 0
    deduplicated_bytes: int = 0
    """Of chunks that an upload needed and that were here already."""
    uploads: int = 0
    """Chunks on their way in, now."""
    downloads: int = 0
    """Answers with chunks on their way out, now."""
    cut_off: int = 0
    """Peers that took or sent too slowly."""


class RelayNode:
    """One relay without the server in front."""

    def __init__(self, settings: RelaySettings) -> None:
        self.settings = settings
        self.core = RelayCore(settings.limits)
        self.chunks = ChunkStore(self.core, settings.memory)
        self.checkpoints = CheckpointStore(self.chunks)
        self.traffic = Traffic()
        self.registrar: Registrar | None = None
        self._manifests_coming = 0

    @property
    def is_registered(self) -> bool:
        return self.registrar is not None and self.registrar.lighthouse is not None

    async def has_manifest(self, key: Key, rank: int, seconds: float) -> None:
        """Returns once it is here; the checkpoint need not even have begun. ``Problem`` when it does not come."""
        deadline = asyncio.get_running_loop().time() + seconds
        while (key, rank) not in self.checkpoints.manifests:
            one = self.core.checkpoints.get(key)
            if one is not None and not rank < one.facts.ranks:
                raise Problem(HTTPStatus.NOT_FOUND, f"{key} has ranks 0 to {one.facts.ranks - 1}, not {rank}")
            if one is None and (key in self.core.ended or not seconds):
                self.core.checkpoint(key)
            self.check_waits()
            try:
                await self.chunks.bells.wait(key, deadline)
            except TimeoutError:
                if key not in self.core.checkpoints:
                    raise Problem(HTTPStatus.NOT_FOUND, f"there is no {key}, after {seconds:g} s") from None
                raise Problem(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"the manifest of rank {rank} of {key} is not here yet, after {seconds:g} s",
                    retry_after=RETRY_AFTER_SECONDS,
                ) from None

    def check_waits(self) -> None:
        if self.chunks.bells.count >= MAX_WAITS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_WAITS} wait already", retry_after=RETRY_AFTER_SECONDS)

    def take_manifest_slot(self) -> None:
        if self._manifests_coming >= MAX_MANIFESTS_COMING:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "too many manifests at once", retry_after=RETRY_AFTER_SECONDS)
        self._manifests_coming += 1

    def give_manifest_slot(self) -> None:
        self._manifests_coming -= 1
