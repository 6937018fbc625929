"""Look at the ports of groups: whether a group answers at its port, and whether the port refuses a connection.

``quorum.presence.ports`` decides what follows. A look goes only to the address from which the group itself
connected, sends no token, and has a deadline. The number of looks is limited; one beyond the limit finds out nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from keepstep_lighthouse.quorum.events import FindPort, PortAnswered, PortRefused, ProbePort
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.fork_safety import open_socket

FIND_PAUSES = (0.0, 2.0, 10.0, 60.0)
"""Seconds before each question: the event loop of a group may be busy for seconds in its first step."""
PROBE_PAUSES = (0.0, 0.005, 0.015, 0.03, 0.05)
"""Seconds before each probe: the kernel may close the connections of a dying process before its port."""
AT_ONCE = 64
"""Limit of questions, and of probes, at the same time; the others wait."""
MAX_LOOKS = 10_000
MAX_ANSWER_BYTES = 4096
"""Limit of an answer, with its head."""
_OK = re.compile(rb"HTTP/1\.[01] 200 ")

Report = Callable[[PortAnswered | PortRefused], None]

log = get_logger("keepstep.lighthouse.ports")


class PortProbes:
    """Carry out ``FindPort`` and ``ProbePort``; ``report`` is called at most once for each."""

    def __init__(self) -> None:
        self._looks: set[asyncio.Task[None]] = set()
        self._questions = asyncio.Semaphore(AT_ONCE)
        self._probes = asyncio.Semaphore(AT_ONCE)

    def find(self, wanted: FindPort, report: Report) -> None:
        """Ask who serves a port; report ``PortAnswered`` if it is this incarnation."""
        if len(self._looks) < MAX_LOOKS:
            self._start(self._find(wanted, report))

    def probe(self, wanted: ProbePort, report: Report) -> None:
        """Connect to a port several times; report ``PortRefused`` when it refuses."""
        if len(self._looks) < MAX_LOOKS:
            self._start(self._probe(wanted, report))

    async def close(self) -> None:
        """End all looks without a report."""
        for look in self._looks:
            look.cancel()
        if self._looks:
            await asyncio.wait(self._looks)

    def _start(self, look: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(look)
        self._looks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._looks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("fault while looking at a port", exc_info=error)

    async def _find(self, wanted: FindPort, report: Report) -> None:
        for pause in FIND_PAUSES:
            await asyncio.sleep(pause)
            async with self._questions:
                found = await serves(wanted.host, wanted.port, wanted.replica_id)
            if found:
                report(PortAnswered(wanted.session))
                return
        log.info("port not found", replica_id=wanted.replica_id, host=wanted.host, port=wanted.port)

    async def _probe(self, wanted: ProbePort, report: Report) -> None:
        try:
            async with asyncio.timeout(wanted.seconds), self._probes:
                for pause in PROBE_PAUSES:
                    await asyncio.sleep(pause)
                    if await refuses(wanted.host, wanted.port):
                        break
                else:
                    return
        except TimeoutError:
            return
        report(PortRefused(wanted.session, wanted.replica_id))


async def serves(host: str, port: int, replica_id: str) -> bool:
    """Return whether the group server of this incarnation answers at ``host``, a numeric address, and ``port``.

    Speaks HTTP/1.0, so that the answer ends with the connection. A client for all of HTTP takes three times as long,
    and all groups of a job come at once.
    """
    name = f"[{host}]" if ":" in host else host
    try:
        async with asyncio.timeout(5.0), _connection(host, port) as server:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(server, f"GET /healthz HTTP/1.0\r\nHost: {name}:{port}\r\n\r\n".encode())
            answer = b""
            while part := await loop.sock_recv(server, MAX_ANSWER_BYTES):
                answer += part
                if len(answer) > MAX_ANSWER_BYTES:
                    raise ValueError(f"answer too large (limit {MAX_ANSWER_BYTES} bytes)")
        head, _, body = answer.partition(b"\r\n\r\n")
        said = json.loads(body)
        return _OK.match(head) is not None and isinstance(said, dict) and said.get("replica_id") == replica_id
    except (OSError, ValueError, RecursionError) as error:
        log.debug("no answer at a port", replica_id=replica_id, host=host, port=port, reason=str(error))
        return False


async def refuses(host: str, port: int) -> bool:
    """Return whether ``host``, a numeric address, refuses a connection to ``port``."""
    try:
        async with _connection(host, port):
            return False
    except ConnectionRefusedError:
        return True
    except OSError as error:
        log.debug("port not reached", host=host, port=port, reason=str(error))
        return False


@asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with open_socket(family, socket.SOCK_STREAM, 0) as opened:
        opened.setblocking(False)
        await asyncio.get_running_loop().sock_connect(opened, (host, port))
        yield opened
