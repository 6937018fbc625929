"""Gloo groups over real processes that are frozen, killed and aborted in the middle of what they do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from keepstep.rendezvous import KeyValueServer

pytestmark = [pytest.mark.training, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT = 60.0
"""Of the groups. What an abort frees must not have waited for it: it is as long as all waits here together may be."""
DEADLINE = 40.0
QUORUMS = itertools.count(1)


class Peer:
    """A rank in a process of its own."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.process = process
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, rank: int, store: str, timeout: float = TIMEOUT) -> Peer:
        script = Path(__file__).with_name("process_group_peer.py")
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, str(script), store, str(rank), str(timeout)]
        return cls(rank, await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    def send(self, do: str, **arguments: Any) -> asyncio.Future[dict[str, Any]]:
        number = next(self._ids)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        return future

    async def ask(self, do: str, **arguments: Any) -> Any:
        answer = await self.answer(self.send(do, **arguments))
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    async def error(self, do: str, **arguments: Any) -> str:
        answer = await self.answer(self.send(do, **arguments))
        assert "error" in answer, answer
        return str(answer["error"])

    async def answer(self, sent: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        return await asyncio.wait_for(sent, DEADLINE)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        await self._reader
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith(b"{"):
                answer = json.loads(line)
                self._answers.pop(answer["id"]).set_result(answer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store() -> AsyncIterator[str]:
    server = KeyValueServer()
    app = web.Application()
    app.add_routes(server.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    server.close()
    await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting(store: str) -> AsyncIterator[list[Peer]]:
    """Three ranks that outlive the tests: each test configures them anew, after whatever became of them in the last."""
    peers = list(await asyncio.gather(*(Peer.start(rank, store) for rank in range(3))))
    yield peers
    await asyncio.gather(*(peer.end() for peer in peers))


@pytest_asyncio.fixture(loop_scope="module")
async def victim(store: str) -> AsyncIterator[Peer]:
    """Rank 3 of 4, to be killed."""
    peer = await Peer.start(3, store)
    yield peer
    await peer.end()


@pytest_asyncio.fixture(loop_scope="module")
async def peers(lasting: list[Peer]) -> list[Peer]:
    await configure(lasting)
    return lasting


async def configure(peers: list[Peer]) -> None:
    await everybody(peers, "configure", quorum=next(QUORUMS), world=len(peers))
    total = sum(peer.rank + 1 for peer in peers)
    assert await everybody(peers, "allreduce") == [[total, total]] * len(peers)


async def everybody(peers: list[Peer], do: str, **arguments: Any) -> list[Any]:
    return list(await asyncio.gather(*(peer.ask(do, **arguments) for peer in peers)))


@contextlib.contextmanager
def frozen(peer: Peer) -> Iterator[None]:
    peer.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        peer.signal(signal.SIGCONT)


@pytest.mark.parametrize(("operation", "size"), [("allreduce", 4), ("allreduce", 20_000_000), ("future", 20_000_000)])
async def test_a_killed_peer_fails_the_operation_of_all_others(
    lasting: list[Peer], victim: Peer, operation: str, size: int
) -> None:
    await configure([*lasting, victim])
    waits = [peer.send(operation, size=size) for peer in lasting]
    if size > 4:
        victim.send(operation, size=size)
    await asyncio.sleep(0.05)
    victim.signal(signal.SIGKILL)
    for peer, wait in zip(lasting, waits, strict=True):
        assert "ProcessGroupError" in (await peer.answer(wait))["error"]
        assert "ProcessGroupError" in await peer.ask("errored")
        assert not await peer.ask("changes_within", seconds=0.2)
    await configure(lasting)


OPERATIONS = [
    ("allreduce", {}, None),
    ("allreduce", {"size": 20_000_000}, ("allreduce", {"size": 20_000_000})),
    ("future", {"size": 20_000_000}, ("future", {"size": 20_000_000})),
    ("barrier", {}, None),
    ("recv", {"source": 2, "size": 10}, None),
    ("recv", {"source": 2, "size": 50_000_000}, ("send", {"to": 0, "size": 50_000_000})),
    ("send", {"to": 2, "size": 10}, None),
    ("send", {"to": 2, "size": 50_000_000}, ("recv", {"source": 0, "size": 50_000_000})),
    ("broadcast", {"root": 2, "size": 50_000_000}, ("broadcast", {"root": 2, "size": 50_000_000})),
]


@pytest.mark.parametrize(("operation", "arguments", "other"), OPERATIONS)
async def test_abort_frees_a_wait_for_a_frozen_peer(
    peers: list[Peer], operation: str, arguments: dict[str, Any], other: tuple[str, dict[str, Any]] | None
) -> None:
    """``other`` is what the peer is in the middle of when it freezes; None: it never began."""
    begun = None if other is None else peers[2].send(other[0], **other[1])
    wait = peers[0].send(operation, **arguments)
    await asyncio.sleep(0.03)
    with frozen(peers[2]):
        await asyncio.sleep(0.2)
        stuck = not wait.done()
        assert stuck or other is not None
        await peers[0].ask("abort", reason="r2 is frozen")
        answer = await peers[0].answer(wait)
        if stuck:
            assert "ProcessGroupAbortedError" in answer["error"]
            assert "r2 is frozen" in answer["error"]
            assert not await peers[0].ask("changes_within", seconds=0.2)
        assert "r2 is frozen" in await peers[0].ask("errored")
    if begun is not None:
        await peers[2].answer(begun)


async def test_a_peer_that_comes_back_from_the_dead_changes_nothing(peers: list[Peer]) -> None:
    with frozen(peers[2]):
        waits = [peer.send("allreduce", size=1_000_000) for peer in peers[:2]]
        await peers[0].ask("abort", reason="r2 is frozen")
        for peer, wait in zip(peers, waits, strict=False):
            assert "error" in await peer.answer(wait)
        await everybody(peers[:2], "configure", quorum=(quorum := next(QUORUMS)), world=2)
        assert await everybody(peers[:2], "allreduce") == [[3.0, 3.0]] * 2
    assert "ProcessGroupError" in await peers[2].error("allreduce", size=1_000_000)
    assert "over" in await peers[2].error("configure", quorum=quorum - 1, world=3)
    assert await everybody(peers[:2], "allreduce") == [[3.0, 3.0]] * 2


async def test_abort_frees_a_configure_whose_peer_froze_on_its_way(peers: list[Peer]) -> None:
    with frozen(peers[2]):
        quorum = next(QUORUMS)
        waits = [peer.send("configure", quorum=quorum, world=3) for peer in peers]
        await asyncio.sleep(0.2)
        for peer, wait in zip(peers[:2], waits, strict=False):
            await peer.ask("abort", reason="r2 is frozen")
            assert "ProcessGroupAbortedError" in (await peer.answer(wait))["error"]
        await configure(peers[:2])
    assert "error" in await peers[2].answer(waits[2])


async def test_an_operation_times_out_on_a_frozen_peer(store: str) -> None:
    peers = [await Peer.start(rank, store, timeout=2.0) for rank in range(2)]
    try:
        await configure(peers)
        with frozen(peers[1]):
            assert "TimeoutError" in await peers[0].error("allreduce")
            assert "TimeoutError" in await peers[0].ask("errored")
    finally:
        await asyncio.gather(*(peer.end() for peer in peers))


async def test_a_trainers_threads_sockets_and_memory_stay_flat_over_reconfigurations(peers: list[Peer]) -> None:
    first = next(QUORUMS)
    for _ in range(209):
        next(QUORUMS)
    usages = await everybody(peers, "reconfigure_often", first=first, times=210, world=3)
    for usage in usages:
        early, late = usage[9], usage[-1]
        assert late["threads"] <= early["threads"] + 8  # of disposals under way
        assert late["descriptors"] <= early["descriptors"] + 24
        assert late["resident"] <= early["resident"] + 8 * 2**20
    print([(u[9], u[-1]) for u in usages])
