"""The worker's half of a session, before a scripted lighthouse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keepstep_mesh.messages import MemberInfo, Quorum
from keepstep_mesh.session import Connected, LighthouseSession, Push, SessionSettings
from keepstep_mesh.testing import DEADLINE, ScriptedLighthouse, ScriptedSession

INFO = MemberInfo(address="http://me:1")
NOWHERE = "http://127.0.0.1:1"
"""Nothing listens there."""


class Worker:
    """A session with its pushes in a queue."""

    def __init__(self, *addresses: str, token: str | None = None, connect_timeout: float = DEADLINE) -> None:
        self.pushes: asyncio.Queue[Push] = asyncio.Queue()
        settings = SessionSettings(addresses, "job one", "r0:1", token, connect_timeout)
        self.session = LighthouseSession(settings, self.pushes.put_nowait)

    async def next_push(self, kind: type[Push]) -> Push:
        async with asyncio.timeout(DEADLINE):
            push = await self.pushes.get()
        assert isinstance(push, kind), push
        return push

    def ask(self, step: int = 4, timeout: float = DEADLINE, info: MemberInfo = INFO) -> asyncio.Task[Quorum]:
        return asyncio.create_task(self.session.quorum(step=step, lineage=2, info=info, timeout=timeout))


@asynccontextmanager
async def in_session(
    lighthouse: ScriptedLighthouse, *addresses: str, **changes: float | str
) -> AsyncIterator[tuple[Worker, ScriptedSession]]:
    """A worker that ``lighthouse`` has welcomed, and the lighthouse's end of it."""
    worker = Worker(*(addresses or (lighthouse.url,)), **changes)
    starting = asyncio.create_task(worker.session.start())
    try:
        peer = await lighthouse.session()
        await starting
        assert await worker.next_push(Connected) == Connected(worker.session.lighthouse, 1)
        yield worker, peer
    finally:
        starting.cancel()
        await asyncio.wait([starting], timeout=DEADLINE)
        await worker.session.close()
