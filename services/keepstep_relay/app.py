"""One relay: its core, its tiers and its server.

Start, in order: open the tiers, restore what they hold, listen, register with a lighthouse. A request, in order: check
it, step the core, carry out the decisions, write to disk, answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from http import HTTPStatus

from aiohttp import web

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.discovery.registration import Registrar, Registration, registered
from keepstep_mesh.net.http import Handler, Identity, Problem, Route
from keepstep_mesh.protocol.telemetry_records import UploadRecord
from keepstep_mesh.security.tls import watched_client_context
from keepstep_mesh.serving.embedded import Embedded
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint, Service
from keepstep_mesh.telemetry.record_sender import Sender
from keepstep_relay.api import admin, bulk, exchange, prometheus, torch_files
from keepstep_relay.core.events import Cause, Kind, RefusedError, UploadEnded
from keepstep_relay.node import RETRY_AFTER_SECONDS, RelayNode
from keepstep_relay.recovery import recover
from keepstep_relay.settings import RelaySettings
from keepstep_relay.tiers.allocator import keep_freed_memory
from keepstep_relay.tiers.chunks import GoneError
from keepstep_relay.tiers.disk_tier import DamagedError, DiskError
from keepstep_relay.tiers.durable_tier import DurableError
from keepstep_relay.tiers.memory_tier import MemoryFullError

READ_AHEAD_BYTES = 1 << 20
"""Bytes of a body that may be buffered before a handler reads them."""
FLUSH_RECORDS_SECONDS = 2.0
"""At the end, for records that the metrics service does not have yet."""
STATUS = {
    Cause.UNKNOWN: HTTPStatus.NOT_FOUND,
    Cause.CONFLICT: HTTPStatus.CONFLICT,
    Cause.GONE: HTTPStatus.GONE,
    Cause.FULL: HTTPStatus.INSUFFICIENT_STORAGE,
}

__all__ = ["Relay", "RelaySettings"]

log = get_logger("keepstep.relay")


class Relay(RelayNode, Embedded):
    """Use ``start`` and ``stop`` inside a running event loop, or ``service`` to run several services in one process."""

    def __init__(self, settings: RelaySettings) -> None:
        RelayNode.__init__(self, settings, on_upload=self._report_upload)
        Embedded.__init__(self, "relay", settings)
        self._telemetry: Sender | None = None
        """None: not registered with a lighthouse yet."""

    def service(self) -> Service:
        return Service(
            name="relay",
            routes=self.routes(),
            lifespan=self._lifespan,
            listening=self._listens,
            neighbours=lambda: {"lighthouse": self.settings.lighthouses},
            places=self.places,
            registry=prometheus.registry(self),
            read_ahead_bytes=READ_AHEAD_BYTES,
        )

    def routes(self) -> list[Route]:
        transfers = (*exchange.routes(self), *bulk.routes(self), *torch_files.routes(self))
        every = (*admin.routes(self, self.routes), *transfers)
        return [replace(one, handler=_explained(one.handler)) for one in every]

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
            registering = asyncio.create_task(self._register(), name="keepstep relay registration")
            try:
                yield
            finally:
                registering.cancel()
                await asyncio.wait([registering])

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


def _explained(handler: Handler) -> Handler:
    """Map the errors of a handler to problems with a status."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as error:
            raise Problem(STATUS[error.cause], str(error)) from error
        except GoneError as error:
            raise Problem(HTTPStatus.GONE, str(error)) from error
        except MemoryFullError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), retry_after=RETRY_AFTER_SECONDS) from error
        except DamagedError as error:
            raise Problem(HTTPStatus.CONFLICT, str(error)) from error
        except DiskError as error:
            log.error("request failed: disk tier", path=request.path, reason=str(error))
            status = HTTPStatus.INSUFFICIENT_STORAGE if error.full else HTTPStatus.SERVICE_UNAVAILABLE
            raise Problem(status, str(error), retry_after=None if error.full else RETRY_AFTER_SECONDS) from error
        except DurableError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), retry_after=RETRY_AFTER_SECONDS) from error
        except TimeoutError as error:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "timed out; retry", retry_after=RETRY_AFTER_SECONDS
            ) from error

    return handle


def hosted_relay(settings: RelaySettings, started: Callable[[Endpoint], None]) -> Hosted:
    """Return the service for ``run_services``, which calls ``started`` with the address on which it listens."""
    keep_freed_memory()
    return Hosted(lambda: Relay(settings).service(), settings, started)
