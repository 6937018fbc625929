"""The worker's half of a session, before a scripted lighthouse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_events import Connected, Disconnected, Push
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Quorum
from keepstep_mesh.testing import DEADLINE, ChaosProxy, ScriptedLighthouse, ScriptedSession, scripted_lighthouse
from tests.support.services.asking_group import quorum_request

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
        request = quorum_request(step, timeout, lineage=2, info=info)
        return asyncio.create_task(self.session.quorum(request))


@asynccontextmanager
async def in_session(
    lighthouse: ScriptedLighthouse, *addresses: str, token: str | None = None, **timing: float
) -> AsyncIterator[tuple[Worker, ScriptedSession]]:
    """A worker that ``lighthouse`` has welcomed, with this ``timing``, and the lighthouse's end of it."""
    worker = Worker(*(addresses or (lighthouse.url,)), token=token)
    starting = asyncio.create_task(worker.session.start())
    try:
        peer = await lighthouse.session(welcome_epoch=None)
        peer.welcome(**timing)
        await starting
        assert await worker.next_push(Connected) == Connected(worker.session.lighthouse, 1)
        yield worker, peer
    finally:
        starting.cancel()
        await asyncio.wait([starting], timeout=DEADLINE)
        await worker.session.close()


@asynccontextmanager
async def cut_off() -> AsyncIterator[tuple[Worker, ScriptedLighthouse, ChaosProxy]]:
    """A worker that was in session and now reaches no lighthouse, until the proxy accepts again."""
    async with (
        scripted_lighthouse() as lighthouse,
        ChaosProxy.before(lighthouse.url) as proxy,
        in_session(lighthouse, proxy.url) as (worker, _),
    ):
        proxy.refuse()
        await worker.next_push(Disconnected)
        yield worker, lighthouse, proxy


async def beats(peer: ScriptedSession, count: int) -> None:
    """Returns when so many heartbeats of the session were heard."""
    async with asyncio.timeout(DEADLINE):
        while peer.heartbeats < count:
            peer.heard.clear()
            await peer.heard.wait()
