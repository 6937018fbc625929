"""Gloo groups of real processes that are frozen, killed and aborted in the middle of collectives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from keepstep.rendezvous.store_client import KeyValueServer
from tests.support.jobs import process_group_peer

pytestmark = [pytest.mark.training, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

TIMEOUT = 60.0
"""Timeout of the groups, longer than all waits here together: only an abort can end an operation in time."""
DEADLINE = 40.0
LARGE = 40_000_000
"""Floats, on their way for a good part of a second."""
QUORUMS = itertools.count(1)


class Asked:
    """A command on its way."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def take(self, line: dict[str, Any]) -> None:
        self.begun.set()
        if "begun" not in line:
            self._answer.set_result(line)

    def over(self) -> bool:
        return self._answer.done()

    async def under_way(self) -> None:
        await asyncio.wait_for(self.begun.wait(), DEADLINE)

    async def answer(self) -> dict[str, Any]:
        return await asyncio.wait_for(self._answer, DEADLINE)

    async def ok(self) -> Any:
        answer = await self.answer()
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    async def error(self) -> str:
        answer = await self.answer()
        assert "error" in answer, answer
        return str(answer["error"])


class Peer:
    """A rank in a process of its own."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.process = process
        self._ids = itertools.count()
        self._asked: dict[int, Asked] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, rank: int, store: str, timeout: float = TIMEOUT) -> Peer:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, process_group_peer.__file__, store, str(rank), str(timeout)]
        return cls(rank, await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    def ask(self, do: str, **arguments: Any) -> Asked:
        number = next(self._ids)
        asked = self._asked[number] = Asked()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        return asked

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
                self._asked[answer["id"]].take(answer)


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
    """Three ranks that outlive the tests: each test configures them again, in whatever state the last one left them."""
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
    return list(await asyncio.gather(*(peer.ask(do, **arguments).ok() for peer in peers)))


@contextlib.contextmanager
def frozen(peer: Peer) -> Iterator[None]:
    peer.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        peer.signal(signal.SIGCONT)


@pytest.mark.parametrize(("operation", "size"), [("allreduce", 4), ("allreduce", LARGE), ("future", LARGE)])
async def test_a_killed_peer_fails_the_operation_of_all_others(
    lasting: list[Peer], victim: Peer, operation: str, size: int
) -> None:
    await configure([*lasting, victim])
    waits = [peer.ask(operation, size=size) for peer in lasting]
    begun = [*waits, victim.ask(operation, size=size)] if size > 4 else waits
    await asyncio.gather(*(one.under_way() for one in begun))
    victim.signal(signal.SIGKILL)
    for peer, wait in zip(lasting, waits, strict=True):
        assert "ProcessGroupError" in await wait.error()
        assert "ProcessGroupError" in await peer.ask("errored").ok()
        assert not await peer.ask("changes_within", seconds=0.2).ok()
    await configure(lasting)


async def test_an_operation_that_waits_for_a_stalled_peer_outlives_another_that_is_done(lasting: list[Peer]) -> None:
    await configure(lasting)
    done, waiting, stalled = lasting
    received = waiting.ask("recv", source=stalled.rank, size=4)
    await received.under_way()
    await done.ask("shutdown").ok()
    await asyncio.sleep(1.5)  # the stall: the peers of these tests look every 0.5 s whether all are there
    await stalled.ask("send", to=waiting.rank, size=4).ok()
    await received.ok()
    assert not await waiting.ask("errored").ok()


OPERATIONS = [
    ("allreduce", {}, None),
    ("allreduce", {"size": LARGE}, ("allreduce", {"size": LARGE})),
    ("future", {"size": LARGE}, ("future", {"size": LARGE})),
    ("barrier", {}, None),
    ("recv", {"source": 1, "size": 10}, None),
    ("recv", {"source": 1, "size": LARGE}, ("send", {"to": 0, "size": LARGE})),
    ("send", {"to": 1, "size": 10}, None),
    ("send", {"to": 1, "size": LARGE}, ("recv", {"source": 0, "size": LARGE})),
    ("broadcast", {"root": 1, "size": LARGE}, ("broadcast", {"root": 1, "size": LARGE})),
]


@pytest.mark.parametrize(("operation", "arguments", "other"), OPERATIONS)
async def test_abort_frees_a_wait_for_a_frozen_peer(
    lasting: list[Peer], operation: str, arguments: dict[str, Any], other: tuple[str, dict[str, Any]] | None
) -> None:
    """``other`` is what the peer is in the middle of when it freezes; None: it never began."""
    peers = lasting[:2]
    await configure(peers)
    theirs = None if other is None else peers[1].ask(other[0], **other[1])
    if theirs is not None:
        await theirs.under_way()
    wait = peers[0].ask(operation, **arguments)
    await wait.under_way()
    await asyncio.sleep(0.02)  # it said so just before it waits
    with frozen(peers[1]):
        await asyncio.sleep(0.2)  # for what was on its way to come: then it is stuck, or over
        stuck = not wait.over()
        assert stuck or theirs is not None
        await peers[0].ask("abort", reason="r1 is frozen").ok()
        answer = await wait.answer()
        if stuck:
            assert "ProcessGroupAbortedError" in answer["error"]
            assert "r1 is frozen" in answer["error"]
            assert not await peers[0].ask("changes_within", seconds=0.2).ok()
        assert "r1 is frozen" in await peers[0].ask("errored").ok()
    if theirs is not None:
        await theirs.answer()


async def test_a_peer_that_comes_back_from_the_dead_changes_nothing(peers: list[Peer]) -> None:
    with frozen(peers[2]):
        waits = [peer.ask("allreduce", size=1_000_000) for peer in peers[:2]]
        await asyncio.gather(*(wait.under_way() for wait in waits))
        await peers[0].ask("abort", reason="r2 is frozen").ok()
        for wait in waits:
            assert "error" in await wait.answer()
        await everybody(peers[:2], "configure", quorum=(quorum := next(QUORUMS)), world=2)
        assert await everybody(peers[:2], "allreduce") == [[3.0, 3.0]] * 2
    assert "ProcessGroupError" in await peers[2].ask("allreduce", size=1_000_000).error()
    assert "over" in await peers[2].ask("configure", quorum=quorum - 1, world=3).error()
    assert await everybody(peers[:2], "allreduce") == [[3.0, 3.0]] * 2


async def test_abort_frees_a_configure_whose_peer_froze_on_its_way(peers: list[Peer]) -> None:
    with frozen(peers[2]):
        quorum = next(QUORUMS)
        waits = [peer.ask("configure", quorum=quorum, world=3) for peer in peers]
        await asyncio.sleep(0.2)  # for all to have begun; who has not is seen to below
        for peer, wait in zip(peers[:2], waits, strict=False):
            while not wait.over():  # the first may find that it has not begun
                await peer.ask("abort", reason="r2 is frozen").ok()
                await asyncio.sleep(0.1)
            assert "ProcessGroupAbortedError" in await wait.error()
        await configure(peers[:2])
    assert "error" in await waits[2].answer()


async def test_an_operation_times_out_on_a_frozen_peer(store: str) -> None:
    peers = [await Peer.start(rank, store, timeout=1.0) for rank in range(2)]
    try:
        await configure(peers)
        with frozen(peers[1]):
            assert "TimeoutError" in await peers[0].ask("allreduce").error()
            assert "TimeoutError" in await peers[0].ask("errored").ok()
    finally:
        await asyncio.gather(*(peer.end() for peer in peers))


async def test_a_trainers_threads_sockets_and_memory_stay_flat_over_reconfigurations(peers: list[Peer]) -> None:
    often: list[list[Any]] = []
    for _ in range(7):  # each in time by itself, however busy the machine
        first, *_ = [next(QUORUMS) for _ in range(30)]
        often.append(await everybody(peers, "reconfigure_often", first=first, times=30, world=3))
    for early, late in [(usages[0][9], usages[-1][-1]) for usages in zip(*often, strict=True)]:
        assert late["threads"] <= early["threads"] + 8  # of disposals under way
        assert late["descriptors"] <= early["descriptors"] + 24
        assert late["resident"] <= early["resident"] + 8 * 2**20
