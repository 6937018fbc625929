"""The worker's half of a lighthouse session against a scripted lighthouse: everything that one could say or do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keepstep_mesh import session as session_module
from keepstep_mesh import session_core
from keepstep_mesh.auth import Tokens
from keepstep_mesh.errors import AuthError, KeepstepError, LayoutMismatch, SessionClosed, VersionError
from keepstep_mesh.messages import (
    PROTOCOL_VERSION,
    CancelRequest,
    Denied,
    Drain,
    Evicted,
    Failed,
    Healing,
    HeldAnswer,
    Leave,
    MemberInfo,
    MemberLost,
    Moved,
    NotLeader,
    Quorum,
    QuorumRequest,
    Refused,
    RoundBroken,
    ServiceAddress,
    Services,
    Timing,
    Welcome,
)
from keepstep_mesh.session import Connected, Disconnected, LighthouseSession, Push, SessionSettings
from keepstep_mesh.testing import DEADLINE, ChaosProxy, ScriptedLighthouse, ScriptedSession, scripted_lighthouse

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


async def test_a_session_opens_with_who_we_are_and_what_we_have_seen() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        assert (peer.hello.replica_id, peer.hello.epoch_seen, peer.hello.held) == ("r0:1", 0, None)
        assert worker.session.lighthouse == lighthouse.url
        assert worker.session.epoch == 1


async def test_a_request_is_answered_and_held_until_finished() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask(step=4)
        request = await peer.next(QuorumRequest)
        assert (request.step, request.lineage, request.info) == (4, 2, INFO)
        peer.answer(request, quorum_id=6)
        quorum = await asking
        assert (quorum.quorum_id, quorum.step, [one.replica_id for one in quorum.members]) == (6, 4, ["r0:1"])
        assert worker.session.quorum_id == 6

        asking = worker.ask(step=5)
        request = await peer.next(QuorumRequest)
        assert request.info is None
        peer.answer(request, quorum_id=6, with_members=False)
        quorum = await asking
        assert quorum.uniform
        assert quorum.members[0].step == 5


async def test_an_open_request_is_asked_again_on_the_next_connection() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        first = await peer.next(QuorumRequest)
        peer.link.abort("test")
        await worker.next_push(Disconnected)
        next_peer = await lighthouse.session()
        again = await next_peer.next(QuorumRequest)
        assert again.request == first.request
        assert again.info == INFO
        assert again.timeout_ms <= first.timeout_ms
        await worker.next_push(Connected)
        next_peer.answer(again)
        assert (await asking).quorum_id == 1


async def test_a_request_made_while_no_lighthouse_is_there_is_asked_when_one_is() -> None:
    async with (
        scripted_lighthouse() as lighthouse,
        ChaosProxy.before(lighthouse.url) as proxy,
        in_session(lighthouse, proxy.url) as (worker, _),
    ):
        proxy.refuse()
        await worker.next_push(Disconnected)
        asking = worker.ask()
        await asyncio.sleep(0)
        proxy.accept()
        peer = await lighthouse.session()
        request = await peer.next(QuorumRequest)
        peer.answer(request)
        assert request.request == 1
        assert (await asking).quorum_id == 1


async def test_a_hello_after_a_break_says_what_is_held_until_the_step_is_finished() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask(step=4)
        peer.answer(await peer.next(QuorumRequest), quorum_id=6)
        await asking
        peer.link.abort("test")
        next_peer = await lighthouse.session()
        assert next_peer.hello.held == HeldAnswer(1, 6, 4)
        assert (next_peer.hello.epoch_seen, next_peer.hello.quorum_id_seen) == (1, 6)
        worker.session.finished_step()
        next_peer.link.abort("test")
        assert (await lighthouse.session()).hello.held is None


async def test_a_broken_session_moves_on_to_the_next_address() -> None:
    async with (
        scripted_lighthouse() as other,
        scripted_lighthouse() as first,
        ChaosProxy.before(first.url) as proxy,
        in_session(first, proxy.url, other.url) as (worker, _),
    ):
        asking = worker.ask()
        proxy.refuse()
        lost = await worker.next_push(Disconnected)
        assert lost.lighthouse == proxy.url
        peer = await other.session(welcome_epoch=2)
        assert await worker.next_push(Connected) == Connected(other.url, 2)
        peer.answer(await peer.next(QuorumRequest), epoch=2)
        assert (await asking).epoch == 2


async def test_an_address_where_nothing_listens_is_passed_over() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse, NOWHERE, lighthouse.url) as (worker, _):
        assert worker.session.lighthouse == lighthouse.url


async def test_a_lighthouse_that_does_not_lead_sends_us_to_the_one_that_does() -> None:
    async with scripted_lighthouse() as leader, scripted_lighthouse() as follower:
        worker = Worker(follower.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await follower.session(welcome_epoch=None)
        peer.send(NotLeader(leader.url))
        await leader.session()
        await starting
        assert worker.session.lighthouse == leader.url
        await worker.session.close()


async def test_a_leader_that_steps_down_in_session_is_left_with_a_word() -> None:
    async with (
        scripted_lighthouse() as successor,
        scripted_lighthouse() as lighthouse,
        in_session(lighthouse) as (worker, peer),
    ):
        peer.send(NotLeader(successor.url))
        await peer.next(Moved)
        await worker.next_push(Disconnected)
        await successor.session(welcome_epoch=2)
        assert await worker.next_push(Connected) == Connected(successor.url, 2)


async def test_a_lighthouse_of_a_lower_epoch_is_not_believed() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        peer.link.abort("test")
        third = await lighthouse.session(welcome_epoch=3)
        third.link.abort("test")
        stale = await lighthouse.session(welcome_epoch=2)
        await stale.ended()
        back = await lighthouse.session(welcome_epoch=3)
        assert back.hello.epoch_seen == 3
        assert worker.session.epoch == 3


async def test_an_answer_of_a_lower_quorum_id_ends_that_session_and_is_asked_again() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        peer.answer(await peer.next(QuorumRequest), quorum_id=9)
        await asking
        asking = worker.ask()
        peer.answer(await peer.next(QuorumRequest), quorum_id=8, with_members=False)
        await peer.next(Moved)
        next_peer = await lighthouse.session()
        assert next_peer.hello.quorum_id_seen == 9
        next_peer.answer(await next_peer.next(QuorumRequest), quorum_id=10)
        assert (await asking).quorum_id == 10


async def test_an_answer_to_nobody_is_ignored() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        old = await peer.next(QuorumRequest)
        asking.cancel()
        assert await peer.next(CancelRequest) == CancelRequest(old.request)
        asking = worker.ask()
        new = await peer.next(QuorumRequest)
        assert new.request > old.request
        peer.send(MemberLost(1, "r9", "between the two"))
        peer.answer(QuorumRequest(old.request, 4, 2, False, 0, 1, INFO))
        await worker.next_push(MemberLost)
        assert not asking.done()
        peer.answer(new, with_members=False)
        await asking


async def test_pushes_are_handed_on_in_order() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        told = [MemberLost(3, "r1:9", "its connection broke"), RoundBroken(3, "half heard"), Drain("node goes down")]
        for message in told:
            peer.send(message)
        assert [await worker.next_push(type(message)) for message in told] == told


async def test_a_denied_request_raises_what_the_lighthouse_said() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        for code, kind in (("deadline", TimeoutError), ("layout", LayoutMismatch), ("superseded", KeepstepError)):
            asking = worker.ask()
            request = await peer.next(QuorumRequest)
            peer.send(Denied(request.request, code, f"because of {code}", "http://peer:1"))
            with pytest.raises(kind, match=f"because of {code}") as raised:
                await asking
            if kind is LayoutMismatch:
                assert raised.value.peer_address == "http://peer:1"


async def test_a_request_ends_at_its_deadline_even_when_the_lighthouse_says_nothing() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        with pytest.raises(TimeoutError, match="did not answer"):
            await worker.ask(timeout=0.05)
        request = await peer.next(QuorumRequest)
        assert request.timeout_ms == 50
        assert await peer.next(CancelRequest) == CancelRequest(request.request)


async def test_a_deadline_without_a_lighthouse_says_that_none_is_reachable() -> None:
    async with (
        scripted_lighthouse() as lighthouse,
        ChaosProxy.before(lighthouse.url) as proxy,
        in_session(lighthouse, proxy.url) as (worker, _),
    ):
        proxy.refuse()
        await worker.next_push(Disconnected)
        with pytest.raises(TimeoutError, match=rf"no lighthouse is reachable \({proxy.url}"):
            await worker.ask(timeout=0.05)


async def test_a_second_request_at_the_same_time_is_an_error_and_harms_nothing() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        request = await peer.next(QuorumRequest)
        with pytest.raises(KeepstepError, match="open already"):
            await worker.ask()
        peer.answer(request)
        await asking


async def test_an_info_that_cannot_travel_is_the_askers_error() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        with pytest.raises(TypeError, match="does not travel"):
            await worker.ask(info=MemberInfo(data=object()))
        asking = worker.ask()
        peer.answer(await peer.next(QuorumRequest))
        await asking


async def test_other_heartbeats_than_the_welcomes_hold_at_once() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        peer.send(Timing(20, 3000, 200))
        async with asyncio.timeout(DEADLINE):
            while peer.heartbeats < 3:
                await peer.heard.wait()
                peer.heard.clear()
        assert (worker.session.heartbeat_interval, worker.session.heartbeat_timeout) == (0.02, 3.0)


async def test_services_come_with_the_welcome_and_change_by_a_push() -> None:
    relay, metrics = ServiceAddress("relay", "a", "http://a:1"), ServiceAddress("metrics", "m", "http://m:2")
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        assert worker.session.services == ()
        peer.send(Services((relay,)))
        assert await worker.next_push(Services) == Services((relay,))
        peer.send(Services((relay,)))
        peer.send(Services((metrics, relay)))
        assert await worker.next_push(Services) == Services((metrics, relay)), "what is known already is not pushed"
        assert worker.session.services == (metrics, relay)
        peer.link.abort("test")
        await worker.next_push(Disconnected)
        assert worker.session.services == (metrics, relay), "kept while no lighthouse is there"
        next_peer = await lighthouse.session(welcome_epoch=None)
        next_peer.send(Welcome(PROTOCOL_VERSION, 1, 0, 30_000, 60_000, 200, "script", (relay,)))
        await worker.next_push(Connected)
        assert await worker.next_push(Services) == Services((relay,))


async def test_heartbeats_are_sent_only_while_nothing_else_is() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await lighthouse.session(welcome_epoch=None)
        peer.welcome(heartbeat=0.02)
        await starting
        async with asyncio.timeout(DEADLINE):
            while peer.heartbeats < 3:
                peer.heard.clear()
                await peer.heard.wait()
        assert peer.received.empty()
        await worker.session.close()


async def test_a_silent_lighthouse_is_given_up() -> None:
    async with scripted_lighthouse() as other, scripted_lighthouse() as first, ChaosProxy.before(first.url) as proxy:
        worker = Worker(proxy.url, other.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await first.session(welcome_epoch=None)
        peer.welcome(heartbeat=0.02, timeout=0.4)
        await starting
        await worker.next_push(Connected)
        proxy.freeze()
        lost = await worker.next_push(Disconnected)
        assert "nothing heard for" in lost.reason
        await other.session()
        assert await worker.next_push(Connected) == Connected(other.url, 1)
        await worker.session.close()


async def test_a_lighthouse_that_only_answers_pings_is_alive() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await lighthouse.session(welcome_epoch=None)
        peer.welcome(heartbeat=0.02, timeout=0.2)
        await starting
        await worker.next_push(Connected)
        async with asyncio.timeout(DEADLINE):
            while peer.heartbeats < 30:
                peer.heard.clear()
                await peer.heard.wait()
        assert worker.pushes.empty()
        await worker.session.close()


async def test_healing_is_told() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        worker.session.healing(10, 100, 2.5)
        assert await peer.next(Healing) == Healing(10, 100, 2.5)


async def test_leaving_waits_for_goodbye_and_ends_the_session() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        leaving = asyncio.create_task(worker.session.leave("done", DEADLINE))
        assert await peer.say_goodbye() == Leave("done")
        await leaving
        await peer.ended()
        with pytest.raises(SessionClosed, match="left the job"):
            await worker.ask()
        await worker.session.leave("again", DEADLINE)


async def test_leaving_is_said_again_on_the_next_connection() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        leaving = asyncio.create_task(worker.session.leave("done", DEADLINE))
        await peer.next(Leave)
        peer.link.abort("test")
        await (await lighthouse.session()).say_goodbye()
        await leaving
        with pytest.raises(SessionClosed, match="left the job"):
            await worker.ask()


async def test_leaving_gives_up_when_nobody_confirms() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, _):
        with pytest.raises(TimeoutError, match=r"did not confirm within 0\.05 s that we leave"):
            await worker.session.leave("done", 0.05)


async def test_a_failed_group_is_reported_and_the_connection_closed() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        await worker.session.failed("rank 1 died", DEADLINE)
        assert await peer.next(Failed) == Failed("rank 1 died")
        await peer.ended()


async def test_a_failed_group_without_a_lighthouse_does_not_wait() -> None:
    async with (
        scripted_lighthouse() as lighthouse,
        ChaosProxy.before(lighthouse.url) as proxy,
        in_session(lighthouse, proxy.url) as (worker, _),
    ):
        proxy.refuse()
        await worker.next_push(Disconnected)
        await worker.session.failed("rank 1 died", DEADLINE)


async def test_an_evicted_group_is_told_and_its_request_ends() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        await peer.next(QuorumRequest)
        peer.send(Evicted("too slow", 60.0))
        assert await worker.next_push(Evicted) == Evicted("too slow", 60.0)
        with pytest.raises(SessionClosed, match="evicted: too slow"):
            await asking
        with pytest.raises(SessionClosed, match="evicted: too slow"):
            await worker.ask()


async def test_a_refusal_for_good_ends_the_start() -> None:
    for code, kind in (("version_too_old", VersionError), ("banned", SessionClosed), ("bad_message", SessionClosed)):
        async with scripted_lighthouse() as lighthouse:
            worker = Worker(lighthouse.url)
            starting = asyncio.create_task(worker.session.start())
            (await lighthouse.session(welcome_epoch=None)).send(Refused(code, f"because of {code}"))
            with pytest.raises(kind, match=f"because of {code}"):
                await starting


async def test_a_lighthouse_that_is_not_ready_is_tried_again() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        for _ in range(3):
            (await lighthouse.session(welcome_epoch=None)).send(Refused("not_ready", "taking over"))
        await lighthouse.session()
        await starting
        await worker.session.close()


async def test_a_start_without_any_lighthouse_says_why() -> None:
    worker = Worker(NOWHERE, connect_timeout=1.0)
    with pytest.raises(TimeoutError, match=rf"no lighthouse welcomed r0:1 within 1 s: {NOWHERE}: Cannot connect"):
        await worker.session.start()
    with pytest.raises(SessionClosed):
        await worker.ask()


async def test_a_start_where_nobody_welcomes_says_so(monkeypatch) -> None:
    monkeypatch.setattr(session_module, "WELCOME_SECONDS", 0.05)
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url, connect_timeout=2.0)
        with pytest.raises(TimeoutError, match=r"connected, but no welcome within 0\.05 s"):
            await worker.session.start()


async def test_a_host_that_does_not_answer_is_passed_over(monkeypatch) -> None:
    monkeypatch.setattr(session_core, "CONNECT_SECONDS", 0.5)
    async with scripted_lighthouse() as lighthouse, ChaosProxy.before(lighthouse.url) as proxy:
        proxy.freeze()
        async with in_session(lighthouse, proxy.url, lighthouse.url) as (worker, _):
            assert worker.session.lighthouse == lighthouse.url


async def test_a_wrong_token_ends_the_start_at_once() -> None:
    async with scripted_lighthouse(Tokens(worker="w" * 20)) as lighthouse:
        for token in (None, "x" * 20):
            with pytest.raises(AuthError, match="KEEPSTEP_TOKEN"):
                await Worker(lighthouse.url, token=token).session.start()
        async with in_session(lighthouse, token="w" * 20):
            pass


async def test_garbage_from_the_lighthouse_is_a_broken_connection_and_no_more() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        await peer.next(QuorumRequest)
        peer.link.send(b"\xc1 no msgpack")
        await worker.next_push(Disconnected)
        next_peer = await lighthouse.session()
        next_peer.answer(await next_peer.next(QuorumRequest))
        await asking


async def test_a_message_for_the_other_side_is_garbage_too() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        peer.send(Leave("me?"))
        lost = await worker.next_push(Disconnected)
        assert "'leave' is not for workers" in lost.reason


async def test_an_answer_before_the_welcome_is_not_taken() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await lighthouse.session(welcome_epoch=None)
        peer.answer(QuorumRequest(1, 0, 0, False, 0, 1, INFO))
        await peer.ended()
        await lighthouse.session()
        await starting
        await worker.session.close()


async def test_closing_in_the_middle_of_a_request_ends_it() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        await peer.next(QuorumRequest)
        await worker.session.close()
        with pytest.raises(SessionClosed, match="closed"):
            await asking
        await worker.session.close()


async def test_closing_before_it_was_started_or_while_it_starts_is_fine() -> None:
    await Worker(NOWHERE).session.close()
    worker = Worker(NOWHERE)
    starting = asyncio.create_task(worker.session.start())
    await asyncio.sleep(0)
    await worker.session.close()
    with pytest.raises(SessionClosed):
        await starting


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await lighthouse.session(welcome_epoch=None)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        await peer.ended()


async def test_many_breaks_in_a_row_lose_nothing() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, first):
        peer = first
        for number in range(1, 6):
            asking = worker.ask(step=number)
            await peer.next(QuorumRequest)
            peer.link.abort("test")
            peer = await lighthouse.session()
            peer.answer(await peer.next(QuorumRequest), quorum_id=number)
            assert (await asking).quorum_id == number
