"""A group server and its ranks, in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_client import RankClient
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.session.session_events import Push
from keepstep.session.session_settings import SessionSettings
from keepstep_lighthouse.app import Lighthouse
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.messages import MemberLost
from keepstep_mesh.security.tokens import ClientToken

DEADLINE = 60.0


class Group:
    """A server and its clients, with the messages that they got."""

    def __init__(
        self, lighthouse: Lighthouse, world_size: int, name: str = "a:1", token: str | ClientToken | None = None
    ) -> None:
        self.failed: list[str] = []
        self.pushes: list[Push] = []
        self.lost: asyncio.Future[MemberLost] = asyncio.get_running_loop().create_future()
        self.server = GroupServer(
            GroupSettings(world_size, "127.0.0.1"),
            SessionSettings((lighthouse.address,), "default", name, token),
            self.failed.append,
            self.hear,
        )
        self.world_size = world_size
        self.token = token
        self.clients: list[RankClient] = []

    def hear(self, push: Push) -> None:
        self.pushes.append(push)
        if isinstance(push, MemberLost) and not self.lost.done():
            self.lost.set_result(push)

    async def start(self) -> None:
        await self.server.start()
        for rank in range(1, self.world_size):
            self.clients.append(await self.connect(rank))

    async def connect(self, rank: int, **changes: Any) -> RankClient:
        timeout = changes.pop("timeout", DEADLINE)
        settings = {"world_size": self.world_size, "restart": 0, "token": self.token, **changes}
        client = RankClient(self.server.address, rank, on_failed=self.failed.append, on_push=self.hear, **settings)
        await client.start(timeout)
        return client

    @property
    def links(self) -> list[Any]:
        return [self.server, *self.clients]

    async def ask(self, **changes: Any) -> list[Any]:
        asks = [link.ask(ask(**changes)) for link in self.links]
        return await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), DEADLINE)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.server.close()


def ask(step: int = 0, request: int = 1, **changes: Any) -> RankAsk:
    values = {"lineage": "", "shrink_only": False, "commit_failures": 0, "timeout_ms": 10_000, **changes}
    return RankAsk(request, step, **values)
