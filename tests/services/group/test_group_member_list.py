"""A group of several ranks in a quorum of hundreds: the member list travels within the group only when it changed.

The lighthouse follows a script, because hundreds of groups do not fit on a test machine; group, ranks and sockets are
real.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import aiohttp
import msgpack
import pytest

from keepstep.group.group_server import GroupServer
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.rank_client import RankClient
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.rendezvous.key_value_server import VERSION, RendezvousError, Table
from keepstep.session.session_events import Push
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import RankAsk, RankHello, RankQuorum, RankReady
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import PROTOCOL_VERSION, Denied, Leave, Quorum, QuorumRequest, RoundBroken
from keepstep_mesh.testing import ScriptedLighthouse, ScriptedSession, scripted_lighthouse

DEADLINE = 30.0
RANKS = 3
MANY = 400
NAME = "g0100:1"
_BYTES_RECEIVED = struct.Struct("=128xQ")
"""Of the kernel's ``struct tcp_info``."""


def members(count: int, step: int = 0) -> tuple[Member, ...]:
    info = MemberInfo("http://10.0.0.1:29511", "http://10.0.0.1:29511", RANKS, "layout")
    return tuple(Member(f"g{number:04}:1", step, 0, 0, shrink_only=False, info=info) for number in range(count))


def received(client: RankClient) -> int:
    """Bytes that came over a rank's connection so far."""
    channel = client._session.channel
    assert channel is not None
    sock: socket.socket = channel.link._transport.get_extra_info("socket")
    (count,) = _BYTES_RECEIVED.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size))
    return int(count)


class Scene:
    """A group of three ranks, and the lighthouse that answers it."""

    def __init__(self, lighthouse: ScriptedLighthouse) -> None:
        self.lighthouse = lighthouse
        self.pushed: list[Push] = []
        self.failed: list[str] = []
        self.server = GroupServer(
            GroupSettings(RANKS, "127.0.0.1"),
            SessionSettings((lighthouse.url,), "default", NAME),
            self.failed.append,
            lambda _: None,
        )
        self.clients: list[RankClient] = []
        self.session: ScriptedSession
        self.step = 0
        self.version = 0

    async def start(self, ranks: int = RANKS) -> None:
        starting = asyncio.create_task(self.server.start())
        self.session = await self.lighthouse.session()
        await starting
        for rank in range(1, ranks):
            client = RankClient(self.server.address, rank, RANKS, 0, None, self.failed.append, self.pushed.append)
            await client.start(DEADLINE)
            self.clients.append(client)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.server.close()

    def begin(self) -> list[asyncio.Task[QuorumPlan]]:
        """All ranks ask for the next step."""
        self.step += 1
        ask = RankAsk(self.step, self.step, 0, shrink_only=False, commit_failures=0, timeout_ms=10_000)
        return [asyncio.create_task(link.ask(ask)) for link in (self.server, *self.clients)]

    async def reply(self, listed: tuple[Member, ...] | None) -> None:
        """``None``: the list is the one sent last."""
        request = await self.session.next(QuorumRequest)
        self.version += listed is not None
        self.session.send(Quorum(request.request, 1, 1, 0, self.version, self.step, 0, 0, listed is None, listed or ()))

    async def round(self, listed: tuple[Member, ...] | None) -> list[QuorumPlan]:
        answers = self.begin()
        await self.reply(listed)
        return await asyncio.wait_for(asyncio.gather(*answers), DEADLINE)

    async def expect(self, listed: tuple[Member, ...] | None, members: tuple[Member, ...]) -> None:
        """A round after which every rank has this list, and all have the same plan."""
        plans = await self.round(listed)
        assert len(plans) == RANKS
        assert {plan.quorum.step for plan in plans} == {self.step}
        assert [plan.members == members for plan in plans] == [True] * RANKS
        assert plans == [plans[0]] * RANKS


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with scripted_lighthouse() as lighthouse:
        one = Scene(lighthouse)
        await one.start()
        yield one
        await one.close()


async def test_while_the_list_stays_a_step_takes_few_bytes_however_many_members_there_are(scene: Scene) -> None:
    await scene.round(members(MANY))
    plans = await scene.round(None)
    before = [received(client) for client in scene.clients]
    for _ in range(20):
        plans, last = await scene.round(None), plans
        assert [plan.members is one.members for plan, one in zip(plans, last, strict=True)] == [True] * RANKS
        assert [plan.max_step for plan in plans] == [scene.step] * RANKS
        assert [plan.replica_rank for plan in plans] == [100] * RANKS
    taken = [received(client) - one for client, one in zip(scene.clients, before, strict=True)]
    assert max(taken) / 20 < 150, f"the list alone has {len(codec.pack(members(MANY)))} bytes"


async def test_a_changed_list_reaches_every_rank_and_is_the_one_that_is_meant_from_then_on(scene: Scene) -> None:
    for listed in (members(MANY), members(MANY - 1), members(MANY, step=7)):
        await scene.expect(listed, listed)
        await scene.expect(None, listed)


async def test_after_a_denied_request_the_list_is_still_right(scene: Scene) -> None:
    await scene.expect(members(MANY), members(MANY))
    denied = scene.begin()
    request = await scene.session.next(QuorumRequest)
    scene.session.send(Denied(request.request, "deadline", "too few groups"))
    results = await asyncio.wait_for(asyncio.gather(*denied, return_exceptions=True), DEADLINE)
    assert [type(result) for result in results] == [TimeoutError] * RANKS
    await scene.expect(None, members(MANY))


async def test_after_a_broken_round_the_list_is_right_whether_it_comes_again_or_not(scene: Scene) -> None:
    await scene.expect(members(MANY), members(MANY))
    for listed, right in ((None, members(MANY)), (members(MANY + 1), members(MANY + 1))):
        scene.session.send(RoundBroken(1, "the answer did not reach g0007:1"))
        await scene.expect(listed, right)
    assert [push for push in scene.pushed if isinstance(push, RoundBroken)]


async def test_after_another_session_with_the_lighthouse_the_list_is_right(scene: Scene) -> None:
    await scene.expect(members(MANY), members(MANY))
    scene.session.link.abort("the network broke")
    scene.session = await scene.lighthouse.session()
    await scene.expect(members(MANY - 2), members(MANY - 2))
    await scene.expect(None, members(MANY - 2))


async def test_a_rank_that_gave_up_on_the_answer_with_the_list_has_it_anyway(scene: Scene) -> None:
    await scene.expect(members(MANY), members(MANY))
    asked = scene.begin()
    request = await scene.session.next(QuorumRequest)
    asked[1].cancel()
    await asyncio.gather(asked[1], return_exceptions=True)
    listed = members(MANY + 3)
    scene.version += 1
    scene.session.send(Quorum(request.request, 1, 1, 0, scene.version, scene.step, 0, 0, uniform=False, listed=listed))
    await asyncio.wait_for(asyncio.gather(asked[0], asked[2]), DEADLINE)
    await scene.expect(None, listed)


async def test_a_group_says_what_it_reads_at_the_rendezvous_and_drops_what_older_quorums_stored(scene: Scene) -> None:
    table = scene.server.key_values
    assert table is not None
    for quorum_id in (1, 2, 3):
        table.set(Table("default", 1, quorum_id), "key", b"value")
        answers = scene.begin()
        request = await scene.session.next(QuorumRequest)
        if quorum_id == 1:
            assert request.info is not None
            assert request.info.rendezvous == VERSION
        facts = (request.request, 1, quorum_id, 0, quorum_id, scene.step, 0, 0)
        scene.session.send(Quorum(*facts, uniform=False, listed=members(MANY)))
        await asyncio.wait_for(asyncio.gather(*answers), DEADLINE)
        assert table.check(Table("default", 1, quorum_id), ["key"])
        with pytest.raises(RendezvousError, match=f"quorum {quorum_id - 1} of job 'default' is over"):
            table.check(Table("default", 1, quorum_id - 1), ["key"])


async def test_an_older_rank_gets_every_list() -> None:
    """The older rank is played by hand: it does not say in its hello that it keeps lists."""
    async with scripted_lighthouse() as lighthouse, aiohttp.ClientSession() as http:
        scene = Scene(lighthouse)
        await scene.start(ranks=RANKS - 1)
        async with http.ws_connect(f"{scene.server.address}/v1/ranks", max_msg_size=0) as older:
            hello = msgpack.unpackb(codec.encode(RankHello(PROTOCOL_VERSION, PROTOCOL_VERSION, RANKS - 1, RANKS, 0)))[
                :6
            ]
            await older.send_bytes(msgpack.packb(hello))
            assert isinstance(codec.decode(await older.receive_bytes()), RankReady)
            for step, listed in enumerate((members(MANY), None, None), start=1):
                ask = RankAsk(step, step, 0, shrink_only=False, commit_failures=0, timeout_ms=10_000)
                await older.send_bytes(codec.encode(ask))
                answers = scene.begin()
                await scene.reply(listed)
                await asyncio.wait_for(asyncio.gather(*answers), DEADLINE)
                async with asyncio.timeout(DEADLINE):
                    while not isinstance(message := codec.decode(await older.receive_bytes()), RankQuorum):
                        pass
                assert message.quorum.listed == members(MANY)
                assert message.quorum == answers[0].result().quorum
            await older.send_bytes(codec.encode(Leave("the test is over")))
            await older.receive()
        await scene.close()
