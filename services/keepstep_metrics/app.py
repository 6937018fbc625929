"""The metrics service: its core, its store and its server.

Start, in order: open the store, load the history, listen, register with a lighthouse. A batch, in order: check it,
apply it, write it to disk, answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.discovery.registration import Registration, registered
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.telemetry_records import BadBatchError, read_batch
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.embedded import Embedded
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint, Service
from keepstep_metrics.api import prometheus, routes
from keepstep_metrics.api.turns import in_turns
from keepstep_metrics.history.machine import KEPT_SECONDS
from keepstep_metrics.lighthouse.draining import Drainer
from keepstep_metrics.lighthouse.live_status import LiveStatusPoller
from keepstep_metrics.node import MetricsNode
from keepstep_metrics.settings import MetricsSettings
from keepstep_metrics.storage.event_store import Store

FILE = "metrics.sqlite"
MAX_JOURNAL_BYTES = 128 << 20
"""A larger journal is replaced by a snapshot before the next one is due."""

__all__ = ["Metrics", "MetricsSettings"]

log = get_logger("keepstep.metrics")


class Metrics(MetricsNode, Embedded):
    """Use ``start`` and ``stop`` inside a running event loop, or ``service`` to run several services in one process."""

    def __init__(self, settings: MetricsSettings) -> None:
        MetricsNode.__init__(self, settings)
        Embedded.__init__(self, "metrics", settings)

    def service(self) -> Service:
        return Service(
            name="metrics",
            routes=self.routes(),
            lifespan=self._lifespan,
            not_ready=lambda: self.store.trouble,
            listening=self._listens,
            neighbours=lambda: {"lighthouse": self.settings.lighthouses},
            places=self.places,
            registry=prometheus.registry(self),
        )

    def routes(self) -> list[Route]:
        return routes.routes(self, self.routes)

    # ---- start and end

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        settings = self.settings
        identity = Identity(settings.shown_token, settings.peer_tls)
        self.asker = LiveStatusPoller(self._lighthouse, identity, settings.peer_tls, self._on_live_change)
        path = settings.data_dir / FILE if settings.data_dir is not None else None
        self.store = await Store.open(path)
        try:
            await self._load_history()
            works = {"writer": self.store.run(), "asker": self.asker.run(), "tidy": self._tidy()}
            works["drainer"] = Drainer(self.core.jobs, self._lighthouse, identity).run()
            works["registration"] = self._register()
            tasks = [asyncio.create_task(work, name=f"keepstep metrics {name}") for name, work in works.items()]
            self.serving = True
            try:
                yield
            finally:
                self.serving = False
                self.notifier.notify_all()
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                self.store.snapshot(self.core.dump())
                await self.store.flush()
        finally:
            await self.store.close()

    async def _load_history(self) -> None:
        plain, batches = await self.store.load()
        if plain is not None:
            self.core.load(plain)
        for t, body in batches:
            try:
                self.core.apply(read_batch(body), t)
            except BadBatchError as error:
                log.warning("skipped a batch of the journal: written by another release", reason=str(error))
        self.core.last_event = max(self.core.last_event, self.store.last_event)
        for job in self.core.jobs.values():
            job.events.clear()  # the store has the events of the journal too
            events = await self.store.newest_events(job.name, job.events.maxlen or 0)
            # those of a later time: the clock was set back since then
            job.events.extend(replace(one, t=min(one.t, self.core.now)) for one in events)
        if plain is not None or batches:
            log.info("history loaded", jobs=len(self.core.jobs), batches=len(batches))

    async def _tidy(self) -> None:
        snapshot_at = time.monotonic()
        while True:
            await asyncio.sleep(min(30.0, self.settings.snapshot_every))
            self.core.forget_before(time.time() - KEPT_SECONDS)
            for job in self.live_change_counts.keys() - self.core.jobs.keys():
                del self.live_change_counts[job]
            self.store.forget_events(time.time() - self.settings.keep_events)
            due = time.monotonic() - snapshot_at >= self.settings.snapshot_every
            if due or self.journal_bytes > MAX_JOURNAL_BYTES:
                snapshot_at, self.journal_bytes = time.monotonic(), 0
                async with self.applying:
                    self.store.snapshot(await in_turns(self.core.dumping()))

    async def _register(self) -> None:
        await self._listening.wait()
        if not self.settings.lighthouses or self._endpoint is None:
            return
        mine = Registration(
            "metrics",
            self.settings.service_name(self._endpoint.port),
            self.known_address,
        )
        async with registered(
            self.settings.lighthouses, mine, token=self.settings.shown_token, tls=self.settings.peer_tls
        ) as self.registrar:
            await asyncio.Event().wait()

    def _lighthouse(self) -> str | None:
        return self.registrar.lighthouse if self.registrar is not None else None

    def _on_live_change(self, job: str) -> None:
        self.live_change_counts[job] += 1
        self.notifier.notify(job)


def hosted_metrics(settings: MetricsSettings, started: Callable[[Endpoint], None]) -> Hosted:
    """Return the service for ``run_services``, which calls ``started`` with the address on which it listens."""
    return Hosted(lambda: Metrics(settings).service(), settings, started)
