"""A replica group that only requests quorums, over a real session with a lighthouse."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Self

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_events import Push
from keepstep.session.session_machine import About
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Quorum, QuorumRequest
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.testing import DEADLINE


def quorum_request(step: int = 0, timeout: float = DEADLINE, **changes: Any) -> QuorumRequest:
    """Return a request for ``LighthouseSession.quorum``. ``changes``: fields that are not those of a healthy group."""
    request = QuorumRequest(
        request=0,
        step=step,
        lineage=f"state {step}",
        shrink_only=False,
        commit_failures=0,
        timeout_ms=round(timeout * 1000),
        info=MemberInfo("http://10.0.0.1:1"),
    )
    return replace(request, **changes)


class Group:
    """A context manager that holds the session. ``pushes`` queues the messages that the lighthouse sends unasked."""

    def __init__(
        self,
        *addresses: str,
        name: str = "r0",
        job: str = "job",
        token: str | ClientToken | None = None,
        tls: TlsFiles | None = None,
        about: About | None = None,
        incarnation: int = 1,
    ) -> None:
        self.pushes: asyncio.Queue[Push] = asyncio.Queue()
        settings = SessionSettings(
            addresses, job, f"{name}:{incarnation}", token, DEADLINE, tls=tls or TlsFiles(), about=about or About()
        )
        self.session = LighthouseSession(settings, self.pushes.put_nowait)

    async def __aenter__(self) -> Self:
        await self.session.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def ask(self, step: int = 0, timeout: float = DEADLINE, **changes: Any) -> Quorum:
        """Request a quorum. ``changes``: other fields of the request."""
        return await self.session.quorum(quorum_request(step, timeout, **changes))

    async def push_of(self, kind: type[Push]) -> Push:
        """Return the next push of a kind; skip others before it."""
        async with asyncio.timeout(DEADLINE):
            while not isinstance(push := await self.pushes.get(), kind):
                pass
        return push
