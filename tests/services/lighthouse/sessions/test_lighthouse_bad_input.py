"""Bad input at the lighthouse's port: a clear error, bounded memory, and no effect on other clients.

In each test a job goes on having quorums beside the mischief.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgpack
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep_lighthouse import app
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.jobs import sessions
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Heartbeat, Quorum, QuorumRequest, Welcome
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.lighthouse_driver import (
    DEADLINE,
    Worker,
    connection,
    eventually,
    lighthouse,
    round_of,
    worker,
    workers,
)

QUIET = Policy(min_replicas=2, reconnect_grace=DEADLINE, heartbeat_timeout=4 * DEADLINE)


class Job:
    """Two groups that train undisturbed."""

    def __init__(self, members: list[Worker]) -> None:
        self.members = members
        self.step = 0
        self.quorum_id = 0

    async def goes_on(self) -> None:
        self.step += 1
        for answer in await round_of(self.members, self.step):
            assert answer.quorum_id == (self.quorum_id or answer.quorum_id)
            self.quorum_id = answer.quorum_id


@asynccontextmanager
async def training(**changes: Any) -> AsyncIterator[tuple[Lighthouse, Job]]:
    async with lighthouse(policy=QUIET, **changes) as one, workers(one.address, 2, "trained") as members:
        job = Job(members)
        await job.goes_on()
        yield one, job
        await job.goes_on()


GARBAGE = {
    "empty": b"",
    "noise": bytes(range(256)),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "no list": msgpack.packb({"kind": "ask"}),
    "empty list": msgpack.packb([]),
    "no kind": msgpack.packb([1, 2, 3]),
    "unknown kind": msgpack.packb(["destroy"]),
    "too few fields": msgpack.packb(["ask", 1]),
    "wrong types": msgpack.packb(["ask", "1", [], {}, 1, 1, 1]),
    "negative": msgpack.packb(["ask", -1, 0, "", False, 0, 1, None]),
    "step beyond 64 bit": msgpack.packb(["ask", 1, 2**64 - 1, "", False, 0, 1, None]),
    "deep": b"\x91" * 100_000,
    "half": msgpack.packb(["ask", 1, 0, "", False, 0, 1, None])[:-3],
    "two at once": codec.encode(Heartbeat()) * 2,
    "large data": msgpack.packb(["ask", 1, 0, "", False, 0, 1, ["", "", 1, "", b"x" * 100_000]]),
    "infinite": msgpack.packb(["healing", 0, 0, float("inf")]),
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("greeted", [False, True])
async def test_a_frame_that_is_no_message_ends_its_session_with_the_reason(name: str, greeted: bool) -> None:
    async with training() as (one, job):
        async with connection(one.address) as stranger:
            if greeted:
                await stranger.hello()
                await stranger.next(Welcome)
            await stranger.socket.send_bytes(GARBAGE[name])
            refused = await stranger.refusal()
            assert (refused.code, bool(refused.reason)) == ("bad_message", True)
            await job.goes_on()
        assert one.bad_messages.total == 1
        async with worker(one.address, "r7:1") as polite:
            await polite.send(Heartbeat())


async def test_random_frames_never_harm_anybody() -> None:
    """Mutations of good frames: the ones that get furthest."""
    chance = random.Random(20261120)
    good = [
        codec.encode(QuorumRequest(1, 0, "", False, 0, 1000, MemberInfo("http://a", data=[1]))),
        *(GARBAGE[name] for name in ("wrong types", "unknown kind", "infinite")),
    ]
    async with training() as (one, job):
        for number in range(150):
            frame = bytearray(chance.choice(good))
            for _ in range(chance.randint(1, 4)):
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            async with worker(one.address, f"x{number}:1") as stranger:
                await stranger.socket.send_bytes(bytes(frame))
                if number % 25 == 0:
                    await job.goes_on()
        await eventually(lambda: len(one.sessions) == 2)
        assert one.bad_messages.total > 0
        assert one.term is not None
        for core in (found.core for found in one.jobs.values()):
            core.validate()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
KINDS = st.sampled_from(["hello", "ask", "cancel", "beat", "healing", "leave", "moved", "failed", "bye", "welcome"])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(KINDS, st.lists(PLAIN, max_size=9)), min_size=1, max_size=5))
async def test_any_fields_of_any_kind_are_taken_or_refused(frames: list[tuple[str, list[Any]]]) -> None:
    async with lighthouse(policy=QUIET) as one:
        async with worker(one.address) as stranger:
            for kind, fields in frames:
                with contextlib.suppress(ConnectionError):
                    await stranger.socket.send_bytes(msgpack.packb([kind, *fields]))
        async with worker(one.address, "other:1") as other:
            await other.send(Heartbeat())
        assert one.term is not None
        for job in one.jobs.values():
            job.core.validate()


async def test_a_frame_that_is_too_large_is_refused_before_it_is_read_whole() -> None:
    async with training() as (one, job):
        async with worker(one.address, "large:1") as stranger:
            with contextlib.suppress(ConnectionError):
                await stranger.socket.send_bytes(bytes(codec.MAX_FRAME_BYTES + 1))
            assert await stranger.ended() in (1006, 1009)
        await job.goes_on()


async def test_a_text_frame_is_refused() -> None:
    async with training() as (one, _), worker(one.address) as stranger:
        await stranger.socket.send_str("hello")
        assert await stranger.ended() == 1003


async def test_a_thousand_idle_sessions_are_carried_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELLO_SECONDS", 10 * DEADLINE)
    process = psutil.Process()
    async with training() as (one, job), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        before = process.memory_info().rss
        url = f"{one.address}/v1/jobs/idle/session"
        idle = []
        for _ in range(20):
            idle += await asyncio.gather(*(http.ws_connect(url) for _ in range(50)))
            await job.goes_on()
        assert len(one.sessions) == 1002
        # Both ends live in this process; the bound is far below what a leak of frames or lists would take.
        assert process.memory_info().rss - before < 200 * 1024 * 1024
        for start in range(0, 1000, 50):
            await asyncio.gather(*(socket.close() for socket in idle[start : start + 50]))
        await eventually(lambda: len(one.sessions) == 2)
        assert list(one.jobs) == ["trained"]


async def test_more_sessions_than_it_holds_are_turned_away_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_SESSIONS", 3)
    async with training() as (one, job), worker(one.address, "third:1"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connection(one.address):
                pass
        assert refused.value.status == 503
        await job.goes_on()


async def test_more_jobs_than_it_keeps_are_turned_away() -> None:
    async with (
        training(max_jobs=2) as (one, _),
        worker(one.address, job="second"),
        connection(one.address, job="third") as third,
    ):
        await third.hello()
        assert (await third.refusal()).code == "not_ready"


async def test_connections_that_break_during_the_upgrade_leave_nothing() -> None:
    async with training() as (one, job):
        host, port = one.address.removeprefix("http://").split(":")
        upgrade = (
            b"GET /v1/jobs/job/session HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        for cut in (0, 1, 40, len(upgrade) - 2, len(upgrade)):
            for _ in range(5):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(upgrade[:cut])
                writer.transport.abort()
        await job.goes_on()
        await eventually(lambda: len(one.sessions) == 2)
        assert {session.replica_id for session in one.sessions.values()} == {f"r{number}:1" for number in range(2)}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 400),
        ("GET", {"Connection": "Upgrade", "Upgrade": "websocket"}, 400),
        ("GET", {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "7"}, 400),
        ("POST", {}, 405),
    ],
)
async def test_a_request_to_a_session_that_is_no_upgrade_is_a_problem(
    method: str, headers: dict[str, str], status: int
) -> None:
    async with training() as (one, _), aiohttp.ClientSession(headers=headers) as http:
        async with http.request(method, f"{one.address}/v1/jobs/job/session") as response:
            assert (response.status, response.content_type) == (status, "application/problem+json")
        assert len(one.sessions) == 2


async def test_a_worker_that_does_not_read_is_cut_off_and_the_others_get_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes on asking; the member list, large here, piles up only to the limit."""
    monkeypatch.setattr(sessions, "UNSENT_BYTES", 1_000_000)
    policy = Policy(min_replicas=1, reconnect_grace=DEADLINE)
    async with lighthouse(policy=policy) as one, workers(one.address, 2) as members:
        data = b"x" * 60_000
        async with aiohttp.ClientSession(read_bufsize=1024) as http:
            deaf = await http.ws_connect(f"{one.address}/v1/jobs/job/session")
            sleeper = Worker(deaf, "deaf:1")
            await sleeper.hello()
            await sleeper.next(Welcome)
            # A list that is never uniform travels with every answer.
            for step in range(400):
                if len(one.sessions) < 3:
                    break
                await sleeper.ask(step, commit_failures=1, info=MemberInfo(data=data))
                for member in members:
                    await member.ask(step, commit_failures=1, info=MemberInfo(data=data))
                for member in members:
                    await member.until(Quorum)
            await eventually(lambda: len(one.sessions) == 2)
            assert "deaf:1" not in {session.replica_id for session in one.sessions.values()}
            await deaf.close()
