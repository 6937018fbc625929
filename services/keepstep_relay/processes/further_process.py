"""A further process of a relay: ``python -m keepstep_relay.processes.further_process DESCRIPTOR``, its control socket.

It ends with the main process, which starts it. Signals that reach all processes of a terminal or a service leave it to
the main process to stop it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from keepstep_mesh.config import logging
from keepstep_mesh.net.event_loop import new_event_loop
from keepstep_mesh.net.malformed_requests import server_log
from keepstep_mesh.security.tls import TlsError, TlsFiles
from keepstep_mesh.serving.open_port import LINGER_SECONDS, FirstRequestLimit, adopt
from keepstep_relay.api.direct_bodies import direct, drop_unread
from keepstep_relay.processes.control import MAX_MESSAGE_BYTES, Control, Message
from keepstep_relay.processes.forwarding import Forwarding
from keepstep_relay.tiers.allocator import keep_freed_memory
from keepstep_relay.tiers.shared_slots import SharedSlots

PR_SET_PDEATHSIG = 1
FINISH_SECONDS = 2.0
"""For open requests after ``Message.STOP``."""
READ_AHEAD_BYTES = 1 << 20
"""Bytes of a body that are buffered before reading from a connection pauses."""

log = logging.get_logger("keepstep.relay.process")


@dataclass(frozen=True, kw_only=True)
class FurtherSettings:
    """Settings that the main process sends to a further one."""

    slots: int
    descriptor: int
    """Of the shared memory."""
    body_seconds: float
    first_request_seconds: float
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    log_level: str = "info"
    log_json: bool | None = None

    @classmethod
    def of(
        cls,
        slots: SharedSlots,
        tls: TlsFiles,
        body_seconds: float,
        first_request_seconds: float,
        logs: tuple[str, bool | None],
    ) -> FurtherSettings:
        cert, key, ca = (None if one is None else str(one) for one in (tls.cert, tls.key, tls.ca))
        return cls(
            slots=slots.count,
            descriptor=slots.descriptor,
            body_seconds=body_seconds,
            first_request_seconds=first_request_seconds,
            cert=cert,
            key=key,
            ca=ca,
            log_level=logs[0],
            log_json=logs[1],
        )

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def tls(self) -> TlsFiles:
        return TlsFiles(*(None if one is None else Path(one) for one in (self.cert, self.key, self.ca)))


class OwnerConnector(aiohttp.BaseConnector):
    """Connects to the main process, which gets its end of each connection over ``control``."""

    def __init__(self, control: Control) -> None:
        super().__init__(limit=0)
        self._control = control

    async def _create_connection(self, _request: aiohttp.ClientRequest, _traces: Any, _timeout: Any) -> Any:
        ours, others = socket.socketpair()
        with others:
            if not self._control.send(Message.REQUESTS, passed=others):
                ours.close()
                raise aiohttp.ClientConnectionError("the main process does not accept connections")
        ours.setblocking(False)
        _, protocol = await self._loop.create_unix_connection(self._factory, sock=ours)
        return protocol


class CountedServer(web.Server):
    """Calls ``on_closed`` when a connection has ended."""

    def __init__(self, *arguments: Any, on_closed: Callable[[], object], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_closed = on_closed

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._on_closed()


class FurtherProcess:
    def __init__(self, control: Control, settings: FurtherSettings) -> None:
        self._control = control
        self._settings = settings
        self._context = self._new_context()
        self._stop = asyncio.Event()
        self._accepting: set[asyncio.Task[None]] = set()
        self._accept: Callable[[], asyncio.BaseProtocol]

    async def run(self) -> None:
        settings = self._settings
        slots = SharedSlots(settings.slots, settings.descriptor)
        limit = FirstRequestLimit(settings.first_request_seconds)
        async with aiohttp.ClientSession(
            connector=OwnerConnector(self._control),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_AHEAD_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as owner:
            forwarding = Forwarding(owner, slots, settings.body_seconds)
            limited = limit.middleware
            server = CountedServer(
                lambda request: limited(request, lambda one: drop_unread(one, forwarding.handle)),
                on_closed=lambda: self._control.send(Message.CLOSED),
                access_log=None,
                logger=server_log,
                lingering_time=LINGER_SECONDS,
                read_bufsize=READ_AHEAD_BYTES,
                auto_decompress=False,
            )
            runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=FINISH_SECONDS)
            await runner.setup()
            try:
                self._accept = direct(limit.acceptor(runner))
                self._control.listen(self._on_message, self._stop.set)
                self._control.send(Message.READY)
                await self._stop.wait()
            finally:
                await runner.cleanup()
        self._control.close()

    def _on_message(self, message: Message, passed: socket.socket | None) -> None:
        match message:
            case Message.CLIENT if passed is not None:
                task = asyncio.get_running_loop().create_task(self._serve(passed))
                self._accepting.add(task)
                task.add_done_callback(self._accepting.discard)
            case Message.CERTIFICATES:
                try:
                    self._context = self._new_context()
                except TlsError as error:
                    log.error("new certificates are not in use yet", reason=str(error))
            case Message.PING:
                self._control.send(Message.PONG)
            case Message.STOP:
                self._stop.set()

    async def _serve(self, connection: socket.socket) -> None:
        if await adopt(self._accept, connection, self._context, self._settings.first_request_seconds) is None:
            self._control.send(Message.CLOSED)

    def _new_context(self) -> ssl.SSLContext | None:
        return self._settings.tls.server_context() if self._settings.tls else None


def main(descriptor: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    end = socket.socket(fileno=descriptor)
    first = end.recv(MAX_MESSAGE_BYTES)
    if not first.startswith(Message.SETTINGS.value):
        return  # the main process ended
    settings = FurtherSettings(**json.loads(first[1:]))
    logging.configure(settings.log_level, as_json=settings.log_json)
    keep_freed_memory()

    async def run() -> None:
        await FurtherProcess(Control(end), settings).run()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    main(int(sys.argv[1]))
