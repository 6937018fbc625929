"""Messages of a session that answer no request."""

from __future__ import annotations

from dataclasses import replace

from keepstep.session.session_events import Connected, Disconnected
from keepstep_mesh.protocol.messages import (
    PROTOCOL_VERSION,
    Drain,
    Healing,
    MemberLost,
    QuorumRequest,
    RoundBroken,
    ServiceAddress,
    Services,
    ShardReport,
    Welcome,
)
from keepstep_mesh.testing import scripted_lighthouse
from tests.services.session.worker import in_session


async def test_pushes_are_handed_on_in_order() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        told = [MemberLost(3, "r1:9", "its connection broke"), RoundBroken(3, "half heard"), Drain("node goes down")]
        for message in told:
            peer.send(message)
        assert [await worker.next_push(type(message)) for message in told] == told


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


async def test_the_next_lighthouse_gets_the_last_report_of_shards_before_the_open_request() -> None:
    """Else it could form a quorum that loses shards."""
    report = ShardReport(1, 0, 4, 0, "fresh", 0, 0.5, 100, ("r1:1",), formed=True)
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        worker.session.shards(report)
        assert await peer.next(ShardReport) == report
        peer.link.abort("test")
        await worker.next_push(Disconnected)
        asking = worker.ask()
        next_peer = await lighthouse.session(welcome_epoch=None)
        next_peer.welcome()
        assert await next_peer.next(ShardReport) == replace(report, formed=False)
        assert (await next_peer.next(QuorumRequest)).step == 4
        asking.cancel()


async def test_healing_is_told() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        worker.session.healing(Healing(10, 100, 2.5, 7, "r0:1", "direct"))
        assert await peer.next(Healing) == Healing(10, 100, 2.5, 7, "r0:1", "direct")
