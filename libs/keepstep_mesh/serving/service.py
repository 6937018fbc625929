"""Run a service: bind the port, answer health checks, serve metrics, stop gracefully.

``serving`` runs a service on the current event loop; ``serving.process`` runs a process of several. A stop has one
deadline and this order: ``/readyz`` fails, the port is closed, the service ends its sessions and tasks (``lifespan``),
the remaining connections are closed.

Tokens and certificates from files are reloaded when the files change, or at once on SIGHUP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import bind_address
from keepstep_mesh.net.addresses import in_url
from keepstep_mesh.net.http import Problem
from keepstep_mesh.net.malformed_requests import server_log
from keepstep_mesh.security.reloaded_files import ReloadedFiles
from keepstep_mesh.security.tls import ServedTls, TlsFiles
from keepstep_mesh.security.tokens import Access, Tokens, check_bind, is_loopback
from keepstep_mesh.serving.application import MAX_BODY_BYTES, Route, application
from keepstep_mesh.serving.listen_settings import ListenSettings
from keepstep_mesh.serving.open_port import (
    FIRST_REQUEST_SECONDS,
    LINGER_SECONDS,
    FirstRequestLimit,
    OpenPort,
    listening,
)
from keepstep_mesh.serving.service_kind import KINDS, only_for
from keepstep_mesh.threads.starting import ThreadPoolExecutor

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = get_logger("keepstep.service")

STOP_SECONDS = 10.0
"""Deadline of a graceful stop."""
READ_AHEAD_BYTES = 2**18
"""Bytes of a request body that are buffered before reading from the connection pauses."""
FILE_CHECK_SECONDS = 2.0
"""Interval at which the files of tokens and certificates are checked for changes."""


@dataclass(frozen=True)
class Service:
    """Description of one service for ``serving``."""

    name: str
    routes: Sequence[Route]
    lifespan: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext
    """Entered before the port opens and left after it closed; leaving it ends sessions and tasks."""
    not_ready: Callable[[], str | None] = lambda: None
    """The reason why ``/readyz`` fails; None: the service is ready."""
    listening: Callable[[Endpoint], None] = lambda _: None
    """Called once with the address on which the service listens."""
    registry: CollectorRegistry | None = None
    """Prometheus metrics for ``/metrics``; None: the route answers 404."""
    neighbours: Callable[[], Mapping[str, Sequence[str]]] = dict
    """Addresses of other services that it knows, by kind, for clients that mistake it for one of them."""
    places: Callable[[], Collection[str]] = tuple
    """Its places (``tokens.place_of``): tokens derived for one of them are accepted."""
    max_body_bytes: int = MAX_BODY_BYTES
    middlewares: Sequence[Middleware] = ()
    """See each request before its token is checked."""
    port: Callable[[Callable[[], asyncio.BaseProtocol], socket.socket, float], OpenPort] = OpenPort
    """Creates the open port from the arguments of ``OpenPort``."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address on which a service listens, with the real port."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{in_url(self.host)}:{self.port}"

    @property
    def near_url(self) -> str:
        """The address under which this machine reaches it."""
        near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host)  # noqa: S104 - compared, not bound
        return self.url if near is None else Endpoint(near, self.port, self.scheme).url


@asynccontextmanager
async def serving(
    service: Service,
    host: str,
    port: int,
    *,
    tokens: Tokens | ReloadedFiles[Tokens] | None = None,
    tls: TlsFiles | None = None,
    insecure: bool = False,
    allow_hosts: Collection[str] = (),
    reload: asyncio.Event | None = None,
    stop_seconds: float = STOP_SECONDS,
    first_request_seconds: float = FIRST_REQUEST_SECONDS,
) -> AsyncIterator[Endpoint]:
    """Serve ``service`` while the context is open.

    Args:
        host: address to listen on.
        port: port to listen on; 0: any free one.
        tokens: accepted tokens; None or empty: every request is accepted.
        tls: certificate, key and CA; None: plain HTTP.
        insecure: allow to listen beyond loopback without tokens.
        allow_hosts: host names beside ``localhost`` that are accepted on loopback without tokens.
        reload: when set, the files of tokens and certificates are reloaded at once.
        stop_seconds: limit of a graceful stop.
        first_request_seconds: limit from accepting a connection to its first request.

    Raises:
        BindError: the port is in use, or may not be used.
        AuthError: without tokens the port would be open to everyone (see ``insecure``).
        TlsError: a certificate or key is invalid.
    """
    known = tokens if isinstance(tokens, ReloadedFiles) else ReloadedFiles("tokens", (), lambda: tokens or Tokens())
    certificates = ReloadedFiles("certificates", tls.all(), tls.served) if tls else None
    if certificates is not None and service.registry is not None:
        _export_end(service.registry, certificates)
    check_bind(host, known.value, insecure=insecure)
    stopping = False

    def not_ready() -> str | None:
        return "the service is stopping" if stopping else service.not_ready()

    app = application(
        all_routes(service, not_ready),
        lambda: known.value,
        max_body_bytes=service.max_body_bytes,
        loopback=is_loopback(host),
        allow_hosts=allow_hosts,
        places=service.places,
    )
    limit = FirstRequestLimit(first_request_seconds)
    app.middlewares.extend((*service.middlewares, limit.middleware))
    if service.name in KINDS:
        app.middlewares.append(only_for(service.name, service.neighbours, lambda: known.value))
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        logger=server_log,
        shutdown_timeout=stop_seconds / 2,
        lingering_time=LINGER_SECONDS,
        read_bufsize=READ_AHEAD_BYTES,
    )
    # Bind before the service starts: without a port it must not touch its store.
    with listening(service.name, host, port) as listener:
        try:
            async with asyncio.timeout(None) as deadline, _cleaned_up(runner), service.lifespan():
                open_port = service.port(limit.acceptor(runner), listener, first_request_seconds)
                await open_port.open(certificates.value.context if certificates is not None else None)
                endpoint = Endpoint(host, listener.getsockname()[1], "http" if certificates is None else "https")
                service.listening(endpoint)
                log.info("service started", service=service.name, url=endpoint.url, tokens_needed=bool(known.value))
                if not known.value:
                    reach = "this machine" if is_loopback(host) else "everyone who reaches the port"
                    log.warning("no token is set", service=service.name, open_to=reach)
                elif certificates is None and not is_loopback(host):
                    log.warning("tokens are sent unencrypted; set --tls-cert", service=service.name)
                try:
                    async with _reloading(known, certificates, open_port, reload or asyncio.Event()):
                        yield endpoint
                finally:
                    stopping = True
                    deadline.reschedule(asyncio.get_running_loop().time() + stop_seconds)
                    open_port.close()
        except TimeoutError:
            if not deadline.expired():
                raise
            log.warning("service did not stop in time", service=service.name, limit_seconds=stop_seconds)
        log.info("service stopped", service=service.name)


def serving_with(
    service: Service, settings: ListenSettings, reload: asyncio.Event | None = None
) -> AbstractAsyncContextManager[Endpoint]:
    """``serving`` with the values of ``settings``. Raises ``ValueError`` for an invalid ``bind``."""
    host, port = bind_address(settings.bind)
    return serving(
        service,
        host,
        port,
        tokens=settings.tokens,
        tls=settings.tls,
        insecure=settings.insecure,
        allow_hosts=settings.hosts,
        reload=reload,
    )


def _export_end(registry: CollectorRegistry, certificates: ReloadedFiles[ServedTls]) -> None:
    # Only services have prometheus_client; this module is imported by trainers too.
    from keepstep_mesh.serving.process_metrics import CertificateEnd  # noqa: PLC0415

    registry.register(CertificateEnd(lambda: certificates.value.ends_at))


@asynccontextmanager
async def _cleaned_up(runner: web.AppRunner) -> AsyncIterator[None]:
    await runner.setup()
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _reloading(
    tokens: ReloadedFiles[Tokens],
    certificates: ReloadedFiles[ServedTls] | None,
    open_port: OpenPort,
    reload: asyncio.Event,
) -> AsyncIterator[None]:
    """Reload tokens and certificates when their files change; in a thread, because file systems can be slow."""

    async def keep_reloading(thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FILE_CHECK_SECONDS):
                    await reload.wait()
            force = reload.is_set()
            reload.clear()
            await loop.run_in_executor(thread, partial(tokens.refresh, force=force))
            if certificates is None:
                continue
            if await loop.run_in_executor(thread, partial(certificates.refresh, force=force)):
                try:
                    await open_port.open(certificates.value.context)
                except OSError as error:
                    log.error("new certificates are not in use yet", reason=str(error))

    if not tokens.files and certificates is None:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="keepstep-files") as thread:
        task = asyncio.create_task(keep_reloading(thread), name="keepstep files")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


def all_routes(service: Service, not_ready: Callable[[], str | None] = lambda: None) -> list[Route]:
    """Return all routes of a service with the access that each requires. ``not_ready``: as in ``Service``."""

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "service": service.name, "time": time.time()})

    async def readyz(_request: web.Request) -> web.Response:
        reason = not_ready()
        if reason is not None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, reason, title="not ready")
        return web.json_response({"status": "ready", "service": service.name})

    async def metrics(_request: web.Request) -> web.Response:
        # Only services have prometheus_client; this module is imported by trainers too.
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415

        if service.registry is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"{service.name} has no metrics")
        return web.Response(body=generate_latest(service.registry), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})

    return [
        *service.routes,
        Route("GET", "/healthz", healthz, Access.OPEN, "the process lives"),
        Route("GET", "/readyz", readyz, Access.OPEN, "the service can do its work"),
        Route("GET", "/metrics", metrics, Access.READ, "Prometheus text format"),
    ]
