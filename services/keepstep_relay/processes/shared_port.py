"""The port of a relay with several processes: the main one accepts, and shares the connections out."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.serving.open_port import OpenPort, adopt
from keepstep_relay.processes.control import Message
from keepstep_relay.processes.main_process import Processes

ACCEPT_RETRY_SECONDS = 1.0
"""After an error such as too many open descriptors."""
MAX_ACCEPTED = 64
"""Connections that are accepted in a row."""

log = get_logger("keepstep.relay.processes")


class SharedPort(OpenPort):
    """Gives each new connection to the process with the fewest. ``processes``: the further ones."""

    def __init__(
        self,
        accept: Callable[[], asyncio.BaseProtocol],
        listener: socket.socket,
        handshake_seconds: float,
        *,
        processes: Processes,
    ) -> None:
        super().__init__(accept, listener, handshake_seconds)
        self._processes = processes
        self._context: ssl.SSLContext | None = None
        self._is_open = False
        self._own: set[asyncio.BaseTransport] = set()
        """Connections of this process; closed ones too until the next is accepted."""
        self._accepting: set[asyncio.Task[None]] = set()
        self._failures_logged = LogLimiter()

    async def open(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        if self._is_open:
            self._processes.tell(Message.CERTIFICATES)
            return
        self._is_open = True
        self._processes.accept = self.accept
        self.listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self.listener.fileno())
        self.listener.close()
        for task in self._accepting:
            task.cancel()

    def _listen(self) -> None:
        if self._is_open:
            asyncio.get_running_loop().add_reader(self.listener.fileno(), self._accept_all)

    def _accept_all(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._failures_logged.allows(time.monotonic()):
                    facts = {"reason": str(error), "retry_seconds": ACCEPT_RETRY_SECONDS}
                    log.error("cannot accept connections; retrying", **facts)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self.listener.fileno())
                loop.call_later(ACCEPT_RETRY_SECONDS, self._listen)
                return
            self._share(connection)

    def _share(self, connection: socket.socket) -> None:
        self._own = {one for one in self._own if not one.is_closing()}
        process = self._processes.least_busy(len(self._own) + len(self._accepting))
        if process is not None and process.give(connection):
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _serve(self, connection: socket.socket) -> None:
        transport = await adopt(self.accept, connection, self._context, self.handshake_seconds)
        if transport is not None:
            self._own.add(transport)
