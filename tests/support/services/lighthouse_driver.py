"""A lighthouse in the test's loop, and workers that send its messages by hand, one in each WebSocket frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

from keepstep_lighthouse.app import Lighthouse, LighthouseSettings
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import PROTOCOL_VERSION, Hello, Quorum, QuorumRequest, Refused, Welcome

DEADLINE = 30.0
M = TypeVar("M")


@asynccontextmanager
async def lighthouse(**settings: Any) -> AsyncIterator[Lighthouse]:
    one = Lighthouse(LighthouseSettings(**{"bind": "127.0.0.1:0", **settings}))
    await one.start()
    try:
        # with etcd the election comes after the port is open
        await eventually(
            lambda: one.term is not None or (one.leadership is not None and one.leadership.leader is not None)
        )
        yield one
    finally:
        await one.stop()


async def eventually(true: Callable[[], bool]) -> None:
    """Wait for a condition that no message announces."""
    async with asyncio.timeout(DEADLINE):
        while not true():  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.01)


class Worker:
    """One WebSocket of a worker. ``next`` skips no message. It sends no heartbeats."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, replica_id: str) -> None:
        self.socket = socket
        self.replica_id = replica_id
        self.welcome: Welcome
        self._requests = 0

    async def send(self, *messages: codec.Message) -> None:
        for message in messages:
            await self.socket.send_bytes(codec.encode(message))

    async def hello(self, **changes: Any) -> None:
        facts = {"version": PROTOCOL_VERSION, "oldest_version": PROTOCOL_VERSION, "replica_id": self.replica_id}
        await self.send(Hello(**{**facts, **changes}))

    async def ask(self, step: int = 0, **changes: Any) -> None:
        """Request a quorum. The first request of a connection carries the info."""
        self._requests += 1
        facts: dict[str, Any] = {
            "request": self._requests,
            "step": step,
            "lineage": "",
            "shrink_only": False,
            "commit_failures": 0,
            "timeout_ms": 60_000,
            "info": MemberInfo(address=f"http://{self.replica_id}"),
        }
        await self.send(QuorumRequest(**{**facts, **changes}))

    async def next(self, kind: type[M]) -> M:
        """Return the next message, which must be of this kind."""
        message = await self.message()
        assert isinstance(message, kind), message
        return message

    async def until(self, kind: type[M]) -> M:
        """Return the next message of this kind; skip others before it."""
        while True:
            if isinstance(message := await self.message(), kind):
                return message

    async def message(self) -> codec.Message:
        async with asyncio.timeout(DEADLINE):
            frame = await self.socket.receive()
        assert frame.type is aiohttp.WSMsgType.BINARY, f"{self.replica_id}: {frame}"
        return codec.decode(frame.data, codec.MAX_SERVER_FRAME_BYTES)

    async def refusal(self) -> Refused:
        """Return the refusal with which the lighthouse ends the session."""
        refused = await self.next(Refused)
        await self.ended()
        return refused

    async def ended(self) -> int:
        """Return the close code: 1006 when the connection broke."""
        async with asyncio.timeout(DEADLINE):
            while (frame := await self.socket.receive()).type is aiohttp.WSMsgType.BINARY:
                pass
        return self.socket.close_code or (1006 if frame.type is aiohttp.WSMsgType.CLOSED else frame.data)

    def cut(self) -> None:
        """Break the connection without a close frame."""
        self.socket._response.close()  # aiohttp has no public way to skip the close frame


@asynccontextmanager
async def connection(address: str, replica_id: str = "r0:1", job: str = "job", **headers: str) -> AsyncIterator[Worker]:
    """A worker that has connected and sent nothing."""
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.ws_connect(f"{address}/v1/jobs/{job}/session", max_msg_size=0) as socket,
    ):
        yield Worker(socket, replica_id)


@asynccontextmanager
async def worker(address: str, replica_id: str = "r0:1", job: str = "job", **hello: Any) -> AsyncIterator[Worker]:
    """A worker that the lighthouse has welcomed."""
    async with connection(address, replica_id, job) as one:
        await one.hello(**hello)
        one.welcome = await one.next(Welcome)
        yield one


@asynccontextmanager
async def workers(address: str, count: int, job: str = "job") -> AsyncIterator[list[Worker]]:
    """Workers ``r0:1``, ``r1:1`` and so on that the lighthouse has welcomed."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(worker(address, f"r{number}:1", job)) for number in range(count)]


async def round_of(members: list[Worker], step: int = 0, **changes: Any) -> list[Quorum]:
    """Request a quorum from each member in order; return their answers and skip other messages."""
    for one in members:
        await one.ask(step, **changes)
    return [await one.until(Quorum) for one in members]
