"""State that the request handlers of one metrics service share: its core, its store and its open streams."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from keepstep_mesh.discovery.registration import Registrar
from keepstep_mesh.protocol.telemetry_records import Batch
from keepstep_mesh.serving.notifier import Notifier
from keepstep_mesh.serving.server_sent_events import EventStreams
from keepstep_metrics.history.machine import MetricsCore
from keepstep_metrics.lighthouse.live_status import LiveStatusPoller
from keepstep_metrics.settings import MetricsSettings
from keepstep_metrics.storage.event_store import Store

MAX_STREAMS = 200


@dataclass(slots=True)
class Traffic:
    batches: int = 0
    records: int = 0
    refused: int = 0
    """Batches refused because the disk failed."""


class MetricsNode:
    """One metrics service without its server."""

    def __init__(self, settings: MetricsSettings) -> None:
        self.settings = settings
        self.core = MetricsCore()
        self.traffic = Traffic()
        self.notifier = Notifier()
        """Keys: names of jobs that changed."""
        self.streams = EventStreams(MAX_STREAMS)
        self.applying = asyncio.Lock()
        """Held while a batch is applied, and while a dump is made."""
        self.serving = False
        """False at the end of the service: streams end."""
        self.store: Store
        self.asker: LiveStatusPoller
        self.registrar: Registrar | None = None
        self.live_change_counts: Counter[str] = Counter()
        self.journal_bytes = 0

    @property
    def is_registered(self) -> bool:
        return self.registrar is not None and self.registrar.lighthouse is not None

    def take(self, batch: Batch, body: bytes) -> int:
        """Apply a batch and return the number of its new records. Wait for ``store.written`` before answering."""
        now = time.time()
        taken, events = self.core.apply(batch, now)
        if taken:
            self.traffic.batches += 1
            self.traffic.records += taken
            self.journal_bytes += len(body)
            self.store.add(now, body, events)
            for job in {batch.head.job, *(job for job, _ in events)}:
                self.notifier.notify(job)
        return taken

    def live_changes(self, job: str) -> int:
        """Return a number that grows when the lighthouse's live status of the job changes."""
        return self.live_change_counts[job]
