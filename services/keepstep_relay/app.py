"""One relay: its core, its tiers and its server.

Start, in order: open the tiers, restore what they hold, listen, register with a lighthouse. A request, in order: check
it, step the core, carry out the decisions, write to disk, answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from keepstep_mesh.config.logging import configured
from keepstep_mesh.discovery.registration import Registrar, Registration, registered
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_mesh.protocol.telemetry_records import UploadRecord
from keepstep_mesh.security.tls import watched_client_context
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.embedded import Embedded
from keepstep_mesh.serving.open_port import FIRST_REQUEST_SECONDS, OpenPort
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint, Service
from keepstep_mesh.telemetry.record_sender import Sender
from keepstep_relay.api import admin, bulk, exchange, frames, prometheus, torch_download
from keepstep_relay.api.direct_bodies import Accept, direct, drop_unread
from keepstep_relay.api.problems import explained
from keepstep_relay.core.events import Kind, UploadEnded
from keepstep_relay.node import RelayNode
from keepstep_relay.processes.further_process import FurtherSettings
from keepstep_relay.processes.main_process import Processes
from keepstep_relay.processes.shared_port import SharedPort
from keepstep_relay.recovery import recover
from keepstep_relay.settings import RelaySettings
from keepstep_relay.tiers.allocator import keep_freed_memory
from keepstep_relay.tiers.shared_slots import SharedSlots

FLUSH_RECORDS_SECONDS = 2.0
"""At the end, for records that the metrics service does not have yet."""
__all__ = ["Relay", "RelaySettings"]


class Relay(RelayNode, Embedded):
    """Use ``start`` and ``stop`` inside a running event loop, or ``service`` to run several services in one process."""

    def __init__(self, settings: RelaySettings) -> None:
        RelayNode.__init__(self, settings, on_upload=self._report_upload)
        Embedded.__init__(self, "relay", settings)
        self._telemetry: Sender | None = None
        """None: not registered with a lighthouse yet."""
        self._processes = Processes(settings.processes - 1, self._count_processes)

    def service(self) -> Service:
        return Service(
            name="relay",
            routes=self.routes(),
            lifespan=self._lifespan,
            not_ready=self.not_ready,
            listening=self._listens,
            neighbours=lambda: {"lighthouse": self.settings.lighthouses},
            places=self.places,
            registry=prometheus.registry(self),
            middlewares=(drop_unread, frames.from_other_process) if self._is_shared else (drop_unread,),
            port=self._open_port,
        )

    @property
    def _is_shared(self) -> bool:
        return self.settings.processes > 1

    def _open_port(self, accept: Accept, listener: socket.socket, handshake_seconds: float) -> OpenPort:
        if self._is_shared:
            return SharedPort(direct(accept), listener, handshake_seconds, processes=self._processes)
        return OpenPort(direct(accept), listener, handshake_seconds)

    def _count_processes(self, serving: int) -> None:
        self.processes = serving

    def routes(self) -> list[Route]:
        transfers = (*exchange.routes(self), *bulk.routes(self), *torch_download.routes(self))
        every = (*admin.routes(self, self.routes), *transfers)
        return [replace(one, handler=explained(one.handler)) for one in every]

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        if self.settings.lighthouses:
            watched_client_context(self.settings.peer_tls)  # unusable files fail the start
        async with contextlib.AsyncExitStack() as stack:
            if self.chunks.disk is not None:
                stack.callback(self.chunks.disk.close)
                await asyncio.to_thread(self.chunks.disk.open)
            if self.chunks.durable is not None:
                await asyncio.to_thread(self.chunks.durable.open)
            await stack.enter_async_context(self.chunks.running())
            await recover(self.checkpoints)
            await stack.enter_async_context(self.checkpoints.running())
            if self._is_shared:
                await stack.enter_async_context(self._running_processes())
            registering = asyncio.create_task(self._register(), name="keepstep relay registration")
            try:
                yield
            finally:
                registering.cancel()
                await asyncio.wait([registering])

    @contextlib.asynccontextmanager
    async def _running_processes(self) -> AsyncIterator[None]:
        settings = self.settings
        with contextlib.closing(SharedSlots(settings.memory // CHUNK_BYTES)) as slots:
            self.chunks.memory.slots = slots
            further = FurtherSettings.of(
                slots, settings.tls, settings.body_timeout, FIRST_REQUEST_SECONDS, configured()
            )
            async with self._processes.running(further):
                yield

    async def _register(self) -> None:
        await self._listening.wait()
        if not self.settings.lighthouses or self._endpoint is None:
            return
        settings = self.settings
        mine = Registration(
            "relay",
            settings.service_name(self._endpoint.port),
            self.known_address,
            details={
                "memory_bytes": settings.memory,
                "disk": settings.data_dir is not None,
                "durable": settings.durable is not None,
            },
        )
        async with registered(
            settings.lighthouses, mine, token=settings.shown_token, tls=settings.peer_tls, looks_for="metrics"
        ) as self.registrar:
            await self._send_telemetry(mine.name, self.registrar)

    async def _send_telemetry(self, name: str, registrar: Registrar) -> None:
        """Report ended uploads to the metrics service that the lighthouse knows, until cancelled."""
        identity = Identity(self.settings.shown_token, self.settings.peer_tls)
        self._telemetry = Sender("relay", name, lambda: registrar.found, identity)
        try:
            await self._telemetry.run()
        finally:
            await self._telemetry.flush(FLUSH_RECORDS_SECONDS)

    def _report_upload(self, one: UploadEnded, began: float) -> None:
        if one.facts.kind is Kind.DURABLE and not one.committed:
            self.traffic.failed_durable_uploads += 1
        if self._telemetry is None:
            return
        self._telemetry.record(
            UploadRecord(
                t=time.time() - (time.monotonic() - one.came_at),
                began=began,
                job=one.key.job,
                checkpoint=one.key.id,
                step=one.facts.step,
                bytes=one.bytes_total,
                bytes_done=one.bytes_done,
                bytes_per_second=one.bytes_per_second,
                state="committed" if one.committed else "aborted" if one.error else "ended",
                error=one.error,
            )
        )


def hosted_relay(settings: RelaySettings, started: Callable[[Endpoint], None]) -> Hosted:
    """Return the service for ``run_services``, which calls ``started`` with the address on which it listens."""
    keep_freed_memory()
    return Hosted(lambda: Relay(settings).service(), settings, started)
