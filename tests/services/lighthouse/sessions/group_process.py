"""A group that asks for one quorum and then waits to be killed: ``group_process.py LIGHTHOUSE REPLICA_ID [HOST]``."""

from __future__ import annotations

import asyncio
import sys

from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.testing import DEADLINE


async def main(address: str, replica_id: str, host: str = "127.0.0.1") -> None:
    settings = SessionSettings((address,), "job", replica_id, connect_timeout=DEADLINE)
    server = GroupServer(GroupSettings(1, host, 0), settings, lambda _: None, lambda _: None)
    await server.start()
    await server.ask(RankAsk(1, 0, "state 0", shrink_only=False, commit_failures=0, timeout_ms=60_000))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
