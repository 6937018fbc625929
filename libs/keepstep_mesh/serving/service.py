"""One way to run a service: bind, be healthy, be ready, be measured, stop in good order.

``serving`` runs a service inside a loop that is there; ``run_several`` is a whole process (``keepstep up``). The
order of a stop: ``/readyz`` says no, the port is closed, the service ends what it holds (``lifespan``), then what is
left of connections is cut. All of it together has one deadline.

Tokens and certificates that come from files are read again when the files change, or at once by SIGHUP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import bind_address
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.addresses import in_url
from keepstep_mesh.net.event_loop import new_event_loop
from keepstep_mesh.net.fork_safety import claim, listening_socket
from keepstep_mesh.net.http import MAX_BODY_BYTES, Handler, Problem, Route, application
from keepstep_mesh.security.reloaded_files import ReloadedFiles
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Access, Tokens, check_bind, is_loopback
from keepstep_mesh.serving.listen_settings import ListenSettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = get_logger("keepstep.service")

STOP_SECONDS = 10.0
"""Deadline of a graceful stop."""
FIRST_REQUEST_SECONDS = 10.0
"""A connection that has sent no request by then is cut: it would hold a descriptor for ever."""

LINGER_SECONDS = 1.0
"""For a peer that goes on sending a request that was answered (a body that is too large), or says no goodbye in TLS."""
BACKLOG = 4096
REREAD_SECONDS = 2.0
"""How often it is looked whether files of tokens and certificates have changed."""


class BindError(KeepstepError):
    """The port could not be had."""


@dataclass(frozen=True)
class Service:
    """What is special about one service; everything else is the same for all."""

    name: str
    routes: Sequence[Route]
    lifespan: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext
    """Entered before the port opens, left after it closed; leaving ends sessions and tasks."""
    not_ready: Callable[[], str | None] = lambda: None
    """Why ``/readyz`` says no; None when it says yes."""
    listening: Callable[[Endpoint], None] = lambda _: None
    """Told once where the service listens."""
    registry: CollectorRegistry | None = None
    """Prometheus metrics of this service, for ``/metrics``."""
    places: Callable[[], Collection[str]] = tuple
    """Where it is known to be (``tokens.place_of``): tokens derived for there are taken."""
    max_body_bytes: int = MAX_BODY_BYTES
    read_ahead_bytes: int = 2**18
    """Of a body, beyond what was taken of it, when reading from its connection pauses."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a service listens; ``port`` is the real one, whatever was asked for."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{in_url(self.host)}:{self.port}"

    @property
    def near_url(self) -> str:
        """As this machine itself reaches it."""
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
    reread: asyncio.Event | None = None,
    stop_seconds: float = STOP_SECONDS,
    first_request_seconds: float = FIRST_REQUEST_SECONDS,
) -> AsyncIterator[Endpoint]:
    """Runs ``service`` while the context is open. ``port`` 0 takes any free one. ``tls``: None speaks plain HTTP.

    ``allow_hosts``: names under which it is reached on loopback without tokens, beside ``localhost``.
    ``reread``, when it is set, has the files of tokens and certificates read again at once. Raises ``BindError`` with
    what to do for a port that is taken, ``AuthError`` for one that would be open to all, ``TlsError`` for certificates.
    """
    known = tokens if isinstance(tokens, ReloadedFiles) else ReloadedFiles("tokens", (), lambda: tokens or Tokens())
    certificates = ReloadedFiles("certificates", tls.all(), tls.server_context) if tls else None
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
    silent: set[asyncio.BaseProtocol] = set()
    app.middlewares.append(heard_from(silent))
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        shutdown_timeout=stop_seconds / 2,
        lingering_time=LINGER_SECONDS,
        read_bufsize=service.read_ahead_bytes,
    )
    # Before the service starts: one whose port is taken must not touch its store.
    with _listening(service.name, host, port) as listener:
        try:
            async with asyncio.timeout(None) as deadline, _cleaned_up(runner), service.lifespan():
                door = _Door(accepting(runner, silent, first_request_seconds), listener, first_request_seconds)
                await door.open(certificates.value if certificates is not None else None)
                endpoint = Endpoint(host, listener.getsockname()[1], "http" if certificates is None else "https")
                service.listening(endpoint)
                log.info("service started", service=service.name, url=endpoint.url, tokens_needed=bool(known.value))
                if not known.value:
                    reach = "this machine only" if is_loopback(host) else "everybody who reaches the port"
                    log.warning("no token is set", service=service.name, open_to=reach)
                elif certificates is None and not is_loopback(host):
                    log.warning("tokens travel unencrypted: no --tls-cert", service=service.name)
                try:
                    async with _kept_fresh(known, certificates, door, reread or asyncio.Event()):
                        yield endpoint
                finally:
                    stopping = True
                    deadline.reschedule(asyncio.get_running_loop().time() + stop_seconds)
                    door.close()
        except TimeoutError:
            if not deadline.expired():
                raise
            log.warning("service was cut off while stopping", service=service.name, after_seconds=stop_seconds)
        log.info("service stopped", service=service.name)


@asynccontextmanager
async def _cleaned_up(runner: web.AppRunner) -> AsyncIterator[None]:
    await runner.setup()
    try:
        yield
    finally:
        await runner.cleanup()


class _Door:
    """The open port. ``open`` again takes new certificates: whoever is in stays, who comes from now on sees those."""

    def __init__(
        self, accepted: Callable[[], asyncio.BaseProtocol], listener: socket.socket, handshake_seconds: float
    ) -> None:
        self._accepted = accepted
        self._listener = listener
        self._handshake_seconds = handshake_seconds
        self._server: asyncio.Server | None = None

    async def open(self, context: ssl.SSLContext | None) -> None:
        # On a copy of the descriptor: nobody who knocks while the one takes over from the other is turned away.
        listener = self._listener.dup()
        claim(listener)
        server = await asyncio.get_running_loop().create_server(
            self._accepted,
            sock=listener,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=self._handshake_seconds if context else None,
            ssl_shutdown_timeout=LINGER_SECONDS if context else None,
            start_serving=False,
        )
        before, self._server = self._server, server
        try:
            await server.start_serving()
        finally:
            if before is not None:
                before.close()

    def close(self) -> None:
        self._listener.close()
        if self._server is not None:
            self._server.close()


@asynccontextmanager
async def _kept_fresh(
    tokens: ReloadedFiles[Tokens],
    certificates: ReloadedFiles[ssl.SSLContext] | None,
    door: _Door,
    reread: asyncio.Event,
) -> AsyncIterator[None]:
    """Reads the files again when they have changed. Files may be slow, so this is done in a thread."""

    async def keep_fresh(thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REREAD_SECONDS):
                    await reread.wait()
            force = reread.is_set()
            reread.clear()
            await loop.run_in_executor(thread, partial(tokens.refresh, force=force))
            if certificates is None:
                continue
            if await loop.run_in_executor(thread, partial(certificates.refresh, force=force)):
                try:
                    await door.open(certificates.value)
                except OSError as error:
                    log.error("new certificates are not used yet", reason=str(error))

    if not tokens.files and certificates is None:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="keepstep-files") as thread:
        keeper = asyncio.create_task(keep_fresh(thread), name="keepstep files")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait([keeper])


def accepting(
    runner: web.AppRunner, silent: set[asyncio.BaseProtocol], first_request_seconds: float
) -> Callable[[], asyncio.BaseProtocol]:
    """What accepts connections, and cuts those that are still ``silent`` after a while. ``runner`` is set up."""
    accept = runner.server
    if accept is None:
        raise RuntimeError("the runner was not set up")
    loop = asyncio.get_running_loop()

    def accepted() -> asyncio.BaseProtocol:
        connection = accept()
        silent.add(connection)
        loop.call_later(first_request_seconds, cut, connection)
        return connection

    def cut(connection: web.RequestHandler) -> None:
        if connection in silent:
            silent.discard(connection)
            if connection.transport is not None:
                connection.transport.abort()

    return accepted


def heard_from(silent: set[asyncio.BaseProtocol]) -> Middleware:
    """Who has sent a request is ``silent`` no more."""

    @web.middleware
    async def heard(request: web.Request, handler: Handler) -> web.StreamResponse:
        silent.discard(request.protocol)
        return await handler(request)

    return heard


@contextlib.contextmanager
def _listening(name: str, host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = listening_socket(host, port, BACKLOG)
    except OSError as error:
        advice = {
            errno.EADDRINUSE: "it is taken; end what listens there, or choose another port (0: any free one)",
            errno.EACCES: "not allowed; choose a port above 1023",
            errno.EADDRNOTAVAIL: "this machine has no such address",
        }.get(error.errno or 0, error.strerror or str(error))
        raise BindError(f"{name} cannot listen on {host}:{port}: {advice}") from error
    with listener:
        yield listener


def all_routes(service: Service, not_ready: Callable[[], str | None] = lambda: None) -> list[Route]:
    """Everything that a service answers, and who may ask for it: the table that is enforced.

    ``not_ready``: why ``/readyz`` says no.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "service": service.name})

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


async def until_signal() -> signal.Signals:
    """Waits for SIGTERM or SIGINT. A second one while stopping ends the process at once."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    watched = (signal.SIGTERM, signal.SIGINT)
    for one in watched:
        loop.add_signal_handler(one, on_signal, one)
    try:
        return await came
    finally:
        for one in watched:
            loop.remove_signal_handler(one)


def _raise_descriptor_limit() -> None:
    """A connection is a descriptor, and the usual soft limit is a thousand."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class Hosted:
    """A service of a process. ``service`` is called on the loop, ``started`` is told where it listens."""

    service: Callable[[], Service]
    settings: ListenSettings
    started: Callable[[Endpoint], None]


def run_several(hosted: Sequence[Hosted], *, uvloop: bool = True) -> None:
    """A whole process: runs the services on one loop until SIGTERM or SIGINT, then stops them in good order.

    Each starts when the one before listens; the last stops first. SIGHUP has the files of tokens and certificates read
    again; where there are none it ends the process, as ever. ``uvloop``: use it where it is installed.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            for one in hosted:
                settings, reread = one.settings, asyncio.Event()
                host, port = bind_address(settings.bind)
                if settings.tls or (isinstance(settings.tokens, ReloadedFiles) and settings.tokens.files):
                    rereads.append(reread)
                    loop.add_signal_handler(signal.SIGHUP, reread_all)
                at = await stack.enter_async_context(
                    serving(
                        one.service(),
                        host,
                        port,
                        tokens=settings.tokens,
                        tls=settings.tls,
                        insecure=settings.insecure,
                        allow_hosts=settings.hosts,
                        reread=reread,
                    )
                )
                one.started(at)
            number = await until_signal()
            log.info("stopping", signal=number.name)

    rereads: list[asyncio.Event] = []

    def reread_all() -> None:
        for every in rereads:
            every.set()

    _raise_descriptor_limit()
    with asyncio.Runner(loop_factory=new_event_loop if uvloop else None) as runner:
        runner.run(main())
