"""The further processes of a relay, as the main process sees them: start, watch, replace, and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.serving.open_port import adopt
from keepstep_relay.processes.control import Control, Message
from keepstep_relay.processes.further_process import FurtherSettings

PROCESS_PING_SECONDS = 5.0
MAX_LOST_PINGS = 6
"""A process that answers none of so many pings is killed and replaced: it is frozen or stuck."""
STOP_PROCESS_SECONDS = 3.0
"""For a process to end after ``Message.STOP``; then it is killed."""
RESTART_BACKOFF = Backoff(first=0.1, most=30.0)
STABLE_SECONDS = 60.0
"""A process that lived so long begins with the first delay again."""

log = get_logger("keepstep.relay.processes")


class Further:
    """One further process."""

    def __init__(self, control: Control, process: asyncio.subprocess.Process) -> None:
        self.control = control
        self.process = process
        self.ready = False
        self.gone = asyncio.Event()
        """It has closed its end of ``control``."""
        self.connections = 0
        """Of clients, that it has."""
        self.lost_pings = 0

    @classmethod
    async def start(cls, settings: FurtherSettings) -> Further:
        """Raises ``OSError``."""
        ours, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control = Control(ours)
        try:
            with others:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "keepstep_relay.processes.further_process", str(others.fileno())),
                    pass_fds=(others.fileno(), settings.descriptor),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                )
        except BaseException:
            control.close()
            raise
        control.send(Message.SETTINGS, settings.encode())
        return cls(control, process)

    def give(self, connection: socket.socket) -> bool:
        """Let it serve a connection of a client. Return False if it accepts none."""
        if not self.control.send(Message.CLIENT, passed=connection):
            return False
        self.connections += 1
        connection.close()
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Processes:
    """``count`` further processes. Usable while ``running`` is open.

    ``on_change`` is called with the number of processes that serve, with this one.
    """

    def __init__(self, count: int, on_change: Callable[[int], object]) -> None:
        self._count = count
        self._on_change = on_change
        self._running: set[Further] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.accept: Callable[[], asyncio.BaseProtocol] | None = None
        """Creates the protocol of a connection to this process; None: the port is not open yet."""

    @asynccontextmanager
    async def running(self, settings: FurtherSettings) -> AsyncIterator[None]:
        keepers = [asyncio.create_task(self._keep(settings), name="keepstep process") for _ in range(self._count)]
        try:
            yield
        finally:
            self._stopping.set()
            self.tell(Message.STOP)
            _, late = await asyncio.wait(keepers, timeout=STOP_PROCESS_SECONDS)
            for task in (*late, *self._tasks):
                task.cancel()
            await asyncio.wait({*keepers, *self._tasks})

    def least_busy(self, own_connections: int) -> Further | None:
        """Return the process with the fewest connections of clients; None: that is this one."""
        serving = [one for one in self._running if one.ready]
        counts = [own_connections, *(one.connections for one in serving)]
        fewest = min(counts)
        return random.choice([one for one, count in zip((None, *serving), counts, strict=True) if count == fewest])  # noqa: S311

    def tell(self, message: Message) -> None:
        """Send a message to all processes."""
        for one in self._running:
            one.control.send(message)

    async def _keep(self, settings: FurtherSettings) -> None:
        """Keep one process running."""
        loop, failures = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            began = loop.time()
            try:
                one = await Further.start(settings)
            except OSError as error:
                reason = f"cannot start: {error}"
            else:
                reason = await self._watch(one)
            if self._stopping.is_set():
                return
            failures = 1 if loop.time() - began > STABLE_SECONDS else failures + 1
            pause = RESTART_BACKOFF.seconds(failures)
            log.error("a process of the relay ended; starting another", reason=reason, retry_seconds=pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _watch(self, one: Further) -> str:
        """Return why a process has ended, when it has."""
        one.control.listen(lambda message, passed: self._on_message(one, message, passed), one.gone.set)
        self._running.add(one)
        try:
            if self._stopping.is_set():
                one.control.send(Message.STOP)
            while not one.gone.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROCESS_PING_SECONDS):
                        await one.gone.wait()
                one.lost_pings += 1
                if one.lost_pings > MAX_LOST_PINGS:
                    one.kill()
                one.control.send(Message.PING)
            # It cannot do anything useful any more, but may still be there.
            one.kill()
            status = await one.process.wait()
        finally:
            self._running.discard(one)
            self._changed()
            one.kill()
            one.control.close()
            await one.process.wait()
        if one.lost_pings > MAX_LOST_PINGS:
            return f"no answer for {MAX_LOST_PINGS * PROCESS_PING_SECONDS:g} s"
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"

    def _on_message(self, one: Further, message: Message, passed: socket.socket | None) -> None:
        match message:
            case Message.READY:
                one.ready = True
                self._changed()
            case Message.REQUESTS if passed is not None and self.accept is not None:
                task = asyncio.get_running_loop().create_task(self._serve(passed, self.accept))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Message.REQUESTS if passed is not None:
                passed.close()
            case Message.CLOSED:
                one.connections -= 1
            case Message.PONG:
                one.lost_pings = 0

    async def _serve(self, requests: socket.socket, accept: Callable[[], asyncio.BaseProtocol]) -> None:
        await adopt(accept, requests, None, 0.0)

    def _changed(self) -> None:
        self._on_change(1 + sum(one.ready for one in self._running))
