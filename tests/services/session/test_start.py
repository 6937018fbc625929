"""A session starts: which lighthouse welcomes it, and what ends the attempt."""

from __future__ import annotations

import asyncio

import pytest

from keepstep.session import session
from keepstep_mesh.errors import AuthError, SessionClosed, VersionError
from keepstep_mesh.net import lighthouse_addresses
from keepstep_mesh.protocol.messages import OLDEST_PROTOCOL_VERSION, NotLeader, QuorumRequest, Refused, Welcome
from keepstep_mesh.security.tokens import Tokens
from keepstep_mesh.testing import ChaosProxy, scripted_lighthouse
from tests.services.session.worker import INFO, NOWHERE, Worker, in_session


async def test_a_session_opens_with_who_we_are_and_what_we_have_seen() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        assert (peer.hello.replica_id, peer.hello.epoch_seen, peer.hello.held) == ("r0:1", 0, None)
        assert worker.session.lighthouse == lighthouse.url
        assert worker.session.epoch == 1


async def test_an_address_where_nothing_listens_is_passed_over() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse, NOWHERE, lighthouse.url) as (worker, _):
        assert worker.session.lighthouse == lighthouse.url


async def test_a_server_of_another_kind_is_passed_over_whatever_it_says() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nwhat")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as other, scripted_lighthouse() as lighthouse:
        elsewhere = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        async with in_session(lighthouse, elsewhere, lighthouse.url) as (worker, _):
            assert worker.session.lighthouse == lighthouse.url


async def test_a_host_that_does_not_answer_is_passed_over(monkeypatch) -> None:
    monkeypatch.setattr(lighthouse_addresses, "SESSION_CONNECT_SECONDS", 0.5)
    async with scripted_lighthouse() as lighthouse, ChaosProxy.before(lighthouse.url) as proxy:
        proxy.freeze()
        async with in_session(lighthouse, proxy.url, lighthouse.url) as (worker, _):
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


async def test_a_lighthouse_that_is_not_ready_is_tried_again() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        for _ in range(3):
            (await lighthouse.session(welcome_epoch=None)).send(Refused("not_ready", "taking over"))
        await lighthouse.session()
        await starting
        assert (worker.session.lighthouse, worker.session.quorum_id) == (lighthouse.url, 0)
        await worker.session.close()


async def test_an_answer_before_the_welcome_is_not_taken() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await lighthouse.session(welcome_epoch=None)
        peer.answer(QuorumRequest(1, 0, 0, False, 0, 1, INFO))
        await peer.ended()
        await lighthouse.session()
        await starting
        assert (worker.session.lighthouse, worker.session.quorum_id) == (lighthouse.url, 0)
        await worker.session.close()


async def test_a_refusal_for_good_ends_the_start() -> None:
    for code, kind in (("version_too_old", VersionError), ("banned", SessionClosed), ("bad_message", SessionClosed)):
        async with scripted_lighthouse() as lighthouse:
            worker = Worker(lighthouse.url)
            starting = asyncio.create_task(worker.session.start())
            (await lighthouse.session(welcome_epoch=None)).send(Refused(code, f"because of {code}"))
            with pytest.raises(kind, match=f"because of {code}"):
                await starting


async def test_a_lighthouse_that_is_too_old_ends_the_start() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        old = OLDEST_PROTOCOL_VERSION - 1
        (await lighthouse.session(welcome_epoch=None)).send(Welcome(old, 1, 0, 30_000, 60_000, 200))
        with pytest.raises(VersionError, match=f"the lighthouse speaks protocol {old}, .*update the lighthouses first"):
            await starting


async def test_a_wrong_token_ends_the_start_at_once() -> None:
    async with scripted_lighthouse(Tokens(worker="w" * 20)) as lighthouse:
        for token in (None, "x" * 20):
            with pytest.raises(AuthError, match="KEEPSTEP_TOKEN"):
                await Worker(lighthouse.url, token=token).session.start()
        async with in_session(lighthouse, token="w" * 20):
            pass


async def test_a_start_without_any_lighthouse_says_why() -> None:
    worker = Worker(NOWHERE, connect_timeout=1.0)
    with pytest.raises(
        TimeoutError, match=rf"no lighthouse welcomed r0:1 within 1 s: {NOWHERE}: nothing listens there"
    ):
        await worker.session.start()
    with pytest.raises(SessionClosed):
        await worker.ask()


async def test_a_start_where_nobody_welcomes_says_so(monkeypatch) -> None:
    monkeypatch.setattr(session, "WELCOME_SECONDS", 0.05)
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url, connect_timeout=2.0)
        with pytest.raises(TimeoutError, match=r"connected, but no welcome within 0\.05 s"):
            await worker.session.start()


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    async with scripted_lighthouse() as lighthouse:
        worker = Worker(lighthouse.url)
        starting = asyncio.create_task(worker.session.start())
        peer = await lighthouse.session(welcome_epoch=None)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        await peer.ended()


async def test_closing_before_it_was_started_or_while_it_starts_is_fine() -> None:
    await Worker(NOWHERE).session.close()
    worker = Worker(NOWHERE)
    starting = asyncio.create_task(worker.session.start())
    await asyncio.sleep(0)
    await worker.session.close()
    with pytest.raises(SessionClosed):
        await starting
