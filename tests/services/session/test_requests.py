"""Requests of a session: answered, asked again, denied, given up."""

from __future__ import annotations

import asyncio

import pytest

from keepstep.session.session_events import Connected, Disconnected
from keepstep_mesh.errors import KeepstepError, LayoutMismatch
from keepstep_mesh.protocol.membership import HeldAnswer, MemberInfo
from keepstep_mesh.protocol.messages import CancelRequest, Denied, MemberLost, Moved, Quorum, QuorumRequest
from keepstep_mesh.testing import scripted_lighthouse
from tests.services.session.worker import INFO, cut_off, in_session
from tests.support.services.asking_group import quorum_request


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
    async with cut_off() as (worker, lighthouse, proxy):
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


async def test_a_request_cancelled_after_its_answer_arrived_holds_no_answer_and_the_lighthouse_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        request = await peer.next(QuorumRequest)
        requests = worker.session._session.requests
        answer = requests.answer

        def cancelled_at_once(number: int, quorum: Quorum) -> None:
            answer(number, quorum)
            asking.cancel()

        monkeypatch.setattr(requests, "answer", cancelled_at_once)
        peer.answer(request)
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await peer.next(CancelRequest) == CancelRequest(request.request)
        peer.link.abort("test")
        assert (await lighthouse.session()).hello.held is None


async def test_the_next_request_may_follow_a_cancelled_one_at_once() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        first = worker.session.request_quorum(quorum_request(4))
        old = await peer.next(QuorumRequest)
        first.cancel()
        second = worker.session.request_quorum(quorum_request(4))
        assert await peer.next(CancelRequest) == CancelRequest(old.request)
        new = await peer.next(QuorumRequest)
        assert new.request > old.request
        second.cancel()
        assert await peer.next(CancelRequest) == CancelRequest(new.request)


async def test_a_denied_request_raises_what_the_lighthouse_said() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        for code, kind in (("deadline", TimeoutError), ("layout", LayoutMismatch), ("unknown", KeepstepError)):
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
    async with cut_off() as (worker, _, proxy):
        with pytest.raises(TimeoutError, match=rf"no lighthouse is reachable \({proxy.url}"):
            await worker.ask(timeout=0.05)


async def test_a_second_request_at_the_same_time_is_an_error_and_harms_nothing() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        request = await peer.next(QuorumRequest)
        with pytest.raises(KeepstepError, match="already open"):
            await worker.ask()
        peer.answer(request)
        await asking


async def test_an_info_that_cannot_travel_is_the_askers_error() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        with pytest.raises(TypeError, match="cannot be encoded"):
            await worker.ask(info=MemberInfo(data=object()))
        asking = worker.ask()
        peer.answer(await peer.next(QuorumRequest))
        await asking


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
