"""A month of a lighthouse: jobs that train once and end, and one job through which groups come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from keepstep_lighthouse.api import prometheus
from keepstep_lighthouse.jobs.event_log import KEPT_IN_ALL, MAX_FILE_BYTES, FiledEventLog
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode, cancelled
from keepstep_lighthouse.jobs.sessions import Session
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_lighthouse.store.opening import store_at
from keepstep_mesh.net import websocket
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import (
    PROTOCOL_VERSION,
    Closed,
    Goodbye,
    Hello,
    Leave,
    Quorum,
    QuorumRequest,
    Refused,
    Welcome,
)
from keepstep_mesh.protocol.policy import Policy
from tests.faults.month.figures import Figures, bytes_of, lines_of
from tests.faults.month.virtual_time import Clock

M = TypeVar("M")
DAY = 86400.0
DAYS = 30
LONG = "long"
NAMES = 20
"""Stable names of half of the groups that visit the long job; the others have names of their own."""


DEFAULTS = LighthouseSettings()
JOBS_PER_PLACE = 80
"""Jobs in a month for each one of --max-jobs: the 4 % that die or fail keep their places for 7 days (job_ttl)."""


class Wire:
    """A ``websocket.Link`` without a network: keeps what the lighthouse sends."""

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None], **_: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[str] = self.loop.create_future()
        self.last_received = self.loop.time()
        self.receive = on_frame
        self.sent: deque[bytes] = deque(maxlen=100)
        self.news = asyncio.Event()
        self._on_lost = on_lost

    def send(self, frame: bytes) -> None:
        self.sent.append(bytes(frame))
        self.news.set()

    def close(self, _code: int = 0, reason: str = "") -> None:
        self.loop.call_soon(self.abort, reason)

    def abort(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
            self._on_lost(reason)
            self.news.set()


class Visitor:
    """A group in a job."""

    def __init__(self, lighthouse: LighthouseNode, job: str, replica_id: str) -> None:
        self._session: Session = lighthouse.new_session(job)
        self._wire: Any = self._session.link
        self._requests = 0
        lighthouse.add_session(self._session)
        self._send(Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, replica_id))
        self._address = f"http://{replica_id}"

    def _send(self, message: codec.Message) -> None:
        self._wire.receive(codec.encode(message))

    async def next(self, kind: type[M]) -> M:
        while True:
            while self._wire.sent:
                message = codec.decode(self._wire.sent.popleft(), codec.MAX_SERVER_FRAME_BYTES)
                if isinstance(message, kind):
                    return message
                if isinstance(message, Refused):
                    raise ConnectionRefusedError(message.reason)
            if self._wire.closed.done():
                raise ConnectionResetError(self._wire.closed.result())
            self._wire.news.clear()
            await self._wire.news.wait()

    def ask(self, step: int, lineage: Any, *, final: bool = False) -> None:
        self._requests += 1
        info = MemberInfo(address=self._address)
        self._send(
            QuorumRequest(self._requests, step, lineage, False, 0, 60_000, info, batches_committed=step, final=final)
        )

    async def leave(self, cause: str = "finished") -> None:
        self._send(Leave("the script ended", cause))
        await self.next(Goodbye)
        self.cut()

    def cut(self) -> None:
        self._wire.abort("the process died")


async def train_once(lighthouse: LighthouseNode, number: int) -> None:
    """Train a job of one group for two steps. One of 50 dies, one of 50 fails, the others finish."""
    group = Visitor(lighthouse, f"job-{number}", f"r0:{number:x}")
    try:
        await group.next(Welcome)
        group.ask(0, "")
        quorum = await group.next(Quorum)
        if number % 50 == 0:
            return
        group.ask(1, quorum.quorum_id, final=number % 50 != 1)
        if number % 50 == 1:
            await group.next(Quorum)
            await group.leave("failed")
        else:
            await group.next(Closed)
            await group.leave()
    finally:
        group.cut()


async def visit(lighthouse: LighthouseNode, number: int) -> None:
    name = f"v{number % NAMES}" if number % 2 else f"pod-{number}"
    group = Visitor(lighthouse, LONG, f"{name}:{number:x}")
    try:
        await group.next(Welcome)
        group.ask(0, "")
        await asyncio.sleep(0)
        if number % 3:
            await group.leave("stopped")
    finally:
        group.cut()


@contextlib.asynccontextmanager
async def running(settings: LighthouseSettings) -> AsyncIterator[LighthouseNode]:
    """Run a lighthouse as its app does, without its server and its polls, which would be most of the work."""
    assert settings.event_log is not None
    one = LighthouseNode(settings, store_at(settings.store), FiledEventLog(settings.event_log))
    await one.store.open()
    await one.events.open()
    await one.begin_term()
    keeper = asyncio.create_task(one.keep_term())
    try:
        yield one
    finally:
        await cancelled(keeper)
        await one.events.close()
        await one.store.close()


async def month(clock: Clock, jobs: int, folder: Path) -> Figures:
    """Return what the lighthouse held. Its clock jumps a day ahead on day 10, and back on day 12."""
    settings = LighthouseSettings(
        store=f"sqlite:///{folder}/lighthouse.db",
        event_log=folder / "events.jsonl",
        policy=Policy(min_replicas=1),
        max_jobs=max(DEFAULTS.max_jobs, jobs // JOBS_PER_PLACE),
    )
    figures = Figures(
        {
            "refused_jobs": 0,
            "jobs": settings.max_jobs,
            "store_keys": settings.max_jobs + 10,
            "events_in_memory": KEPT_IN_ALL,
            "event_log_bytes": 2.1 * MAX_FILE_BYTES,
            "long_job_groups": 4000,
        }
    )
    refused = 0
    websocket_link, websocket.Link = websocket.Link, Wire  # type: ignore[misc, assignment]
    try:
        async with running(settings) as one:
            registry = prometheus.registry(one)
            for number in range(jobs):
                at = number * DAYS * DAY / jobs
                await asyncio.sleep(max(0.0, at - clock.monotonic))
                try:
                    await train_once(one, number)
                except ConnectionRefusedError:
                    refused += 1
                await visit(one, number)
                if number % max(1, jobs // DAYS // 24) == 0:
                    await one.endings.expire()
                if number and number % (jobs // DAYS) == 0:
                    day = round(at / DAY)
                    clock.set_by({10: DAY, 12: -DAY}.get(day, 0.0))
                    stored = await one.store.get_prefix("")
                    figures.add(
                        day,
                        refused_jobs=refused,
                        jobs=len(one.jobs),
                        sessions=len(one.sessions),
                        store_keys=len(stored),
                        store_bytes=sum(map(len, stored.values())),
                        database_bytes=bytes_of(folder, "lighthouse.db*"),
                        events_in_memory=one.events._kept_in_all,
                        event_log_bytes=bytes_of(folder, "events.jsonl*"),
                        metric_lines=lines_of(registry),
                        long_job_groups=len(one.jobs[LONG].core.replicas(clock.monotonic)),
                    )
    finally:
        websocket.Link = websocket_link  # type: ignore[misc]
    return figures
