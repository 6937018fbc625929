"""The connection of a session: alive, silent, broken, moved to another lighthouse."""

from __future__ import annotations

from keepstep.session.session_events import Connected, Disconnected
from keepstep_mesh.protocol.messages import Leave, Moved, NotLeader, QuorumRequest, Timing
from keepstep_mesh.testing import ChaosProxy, scripted_lighthouse
from tests.services.session.worker import beats, in_session


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


async def test_heartbeats_are_sent_only_while_nothing_else_is() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse, heartbeat=0.02) as (_, peer):
        await beats(peer, 3)
        assert peer.received.empty()


async def test_other_heartbeats_than_the_welcomes_hold_at_once() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        peer.send(Timing(20, 3000, 200))
        await beats(peer, 3)
        assert (worker.session.liveness.interval, worker.session.liveness.timeout) == (0.02, 3.0)


async def test_a_silent_lighthouse_is_given_up() -> None:
    async with (
        scripted_lighthouse() as other,
        scripted_lighthouse() as first,
        ChaosProxy.before(first.url) as proxy,
        in_session(first, proxy.url, other.url, heartbeat=0.02, timeout=0.4) as (worker, _),
    ):
        proxy.freeze()
        lost = await worker.next_push(Disconnected)
        assert "silent for" in lost.reason
        await other.session()
        assert await worker.next_push(Connected) == Connected(other.url, 1)


async def test_a_lighthouse_that_only_answers_pings_is_alive() -> None:
    async with (
        scripted_lighthouse() as lighthouse,
        in_session(lighthouse, heartbeat=0.02, timeout=0.2) as (worker, peer),
    ):
        await beats(peer, 30)
        assert worker.pushes.empty()


async def test_garbage_from_the_lighthouse_is_a_broken_connection_and_no_more() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        await peer.next(QuorumRequest)
        peer.link.send(b"\xc1 no msgpack")
        await worker.next_push(Disconnected)
        next_peer = await lighthouse.session()
        next_peer.answer(await next_peer.next(QuorumRequest))
        assert (await asking).quorum_id == 1


async def test_a_message_for_the_other_side_is_garbage_too() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        peer.send(Leave("me?"))
        lost = await worker.next_push(Disconnected)
        assert "unexpected message 'leave'" in lost.reason
