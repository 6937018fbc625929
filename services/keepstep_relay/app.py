"""One relay: its core, its tiers, and the server in front.

The duties of a life, in their order: open the tiers, find again what they hold, listen, register with a lighthouse. Of
a request: check what it says, tell the core, carry out what it decides, write down what must last, answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus

from aiohttp import web

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.discovery.registration import Registrar, Registration, registered
from keepstep_mesh.net.http import Handler, Identity, Problem, Route
from keepstep_mesh.security.tls import watched_client_context
from keepstep_mesh.serving.embedded import Embedded
from keepstep_mesh.serving.service import Service
from keepstep_mesh.telemetry.record_sender import Sender
from keepstep_relay.api import admin, bulk, prometheus
from keepstep_relay.checkpoint_store import CheckpointStore
from keepstep_relay.core.events import Cause, Key, RefusedError, UploadEnded
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.settings import RelaySettings
from keepstep_relay.tiers.chunks import ChunkStore, GoneError
from keepstep_relay.tiers.disk_tier import DamagedError, DiskError, DiskTier
from keepstep_relay.tiers.durable_tier import DurableError, DurableTier
from keepstep_relay.tiers.memory_tier import MemoryFullError

MAX_WAITS = 10_000
MAX_MANIFESTS_COMING = 8
"""Each may be large, and is not yet part of the memory tier."""
READ_AHEAD_BYTES = 1 << 20
"""Of a body, beyond what was taken of it."""
AGAIN_SECONDS = 1.0
"""What ``Retry-After`` says."""
LAST_WORDS_SECONDS = 2.0
"""At the end, for what the metrics service was not told yet."""
STATUS = {
    Cause.UNKNOWN: HTTPStatus.NOT_FOUND,
    Cause.CONFLICT: HTTPStatus.CONFLICT,
    Cause.GONE: HTTPStatus.GONE,
    Cause.FULL: HTTPStatus.INSUFFICIENT_STORAGE,
}

__all__ = ["Relay", "RelaySettings"]

log = get_logger("keepstep.relay")


class Relay(Embedded):
    """``start`` and ``stop`` run it within a loop that is there; ``service`` is for one that runs several."""

    def __init__(self, settings: RelaySettings) -> None:
        super().__init__("relay", settings)
        self.settings = settings
        self.core = RelayCore(settings.limits)
        self.chunks = ChunkStore(self.core, settings.memory)
        self.checkpoints = CheckpointStore(self.chunks)
        self.traffic = prometheus.Traffic()
        self._manifests_coming = 0
        self._registrar: Registrar | None = None

    @property
    def is_registered(self) -> bool:
        return self._registrar is not None and self._registrar.lighthouse is not None

    def service(self) -> Service:
        return Service(
            name="relay",
            routes=self.routes(),
            lifespan=self._lifespan,
            listening=self._listens,
            places=self.places,
            registry=prometheus.registry(self),
            read_ahead_bytes=READ_AHEAD_BYTES,
        )

    def routes(self) -> list[Route]:
        return [replace(one, handler=_explained(one.handler)) for one in (*admin.routes(self), *bulk.routes(self))]

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        if self.settings.lighthouses:
            watched_client_context(self.settings.peer_tls)  # files that cannot be used are an error now, not in a task
        async with contextlib.AsyncExitStack() as stack:
            if self.settings.data_dir is not None:
                self.chunks.disk = await asyncio.to_thread(DiskTier, self.settings.data_dir)
                stack.callback(self.chunks.disk.close)
            if self.settings.durable is not None:
                self.chunks.durable = await asyncio.to_thread(DurableTier, self.settings.durable)
            await stack.enter_async_context(self.chunks.running())
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
        ) as self._registrar:
            await self._tell(mine.name, self._registrar)

    async def _tell(self, name: str, registrar: Registrar) -> None:
        """Tells the metrics service, once there is one, of uploads that ended."""
        identity = Identity(self.settings.shown_token, self.settings.peer_tls)
        sender = Sender("relay", name, lambda: registrar.found, identity)

        def tell(one: UploadEnded, begun: float) -> None:
            sender.record(
                "transfer",
                t=time.time() - (time.monotonic() - one.came_at),
                began=begun,
                job=one.key.job,
                checkpoint=one.key.id,
                step=one.facts.step,
                bytes=one.bytes_total,
                bytes_done=one.bytes_done,
                bytes_per_second=one.bytes_per_second,
                state="committed" if one.committed else "aborted" if one.error else "ended",
                error=one.error,
            )

        self.checkpoints.on_upload = tell
        try:
            await sender.run()
        finally:
            await sender.flush(LAST_WORDS_SECONDS)

    # ---- what handlers share

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
                    retry_after=AGAIN_SECONDS,
                ) from None

    def check_waits(self) -> None:
        if self.chunks.bells.count >= MAX_WAITS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_WAITS} wait already", retry_after=AGAIN_SECONDS)

    def take_manifest_slot(self) -> None:
        if self._manifests_coming >= MAX_MANIFESTS_COMING:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "too many manifests at once", retry_after=AGAIN_SECONDS)
        self._manifests_coming += 1

    def give_manifest_slot(self) -> None:
        self._manifests_coming -= 1


def _explained(handler: Handler) -> Handler:
    """Whatever a request ends with has its status and says what to do."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as error:
            raise Problem(STATUS[error.cause], str(error)) from error
        except GoneError as error:
            raise Problem(HTTPStatus.GONE, str(error)) from error
        except MemoryFullError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), retry_after=AGAIN_SECONDS) from error
        except DamagedError as error:
            raise Problem(HTTPStatus.CONFLICT, str(error)) from error
        except DiskError as error:
            log.error("the disk tier failed a request", path=request.path, reason=str(error))
            status = HTTPStatus.INSUFFICIENT_STORAGE if error.full else HTTPStatus.SERVICE_UNAVAILABLE
            raise Problem(status, str(error), retry_after=None if error.full else AGAIN_SECONDS) from error
        except DurableError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), retry_after=AGAIN_SECONDS) from error
        except TimeoutError as error:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "it did not come in time; ask again", retry_after=AGAIN_SECONDS
            ) from error

    return handle
