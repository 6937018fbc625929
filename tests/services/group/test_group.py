"""The ranks of a group over real sockets, with a real lighthouse behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from keepstep.group import slow_quorum_log
from keepstep.group.group_peers import checkpoint_metadata, first_layout_difference
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.rank_link import Leaving
from keepstep.session.session_events import Push
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.quorum.events import EvictOrdered
from keepstep_lighthouse.quorum.views.replicas import HealView
from keepstep_lighthouse.registry.service_registry import new_record
from keepstep_mesh.errors import JobClosed, KeepstepError, LayoutMismatch, SessionClosed, StartRefused
from keepstep_mesh.protocol.group_messages import RankAsk, RankVote
from keepstep_mesh.protocol.messages import Evicted, Exposure, Healing, Quorum, RoundBroken, ServiceAddress, ShardReport
from keepstep_mesh.protocol.policy import Policy
from tests.services.group.group_driver import DEADLINE, Group, ask
from tests.support.services.lighthouse_driver import eventually
from tests.support.services.lighthouse_driver import lighthouse as in_loop


async def test_all_ranks_get_the_same_quorum_once_all_have_asked(pair):
    first = asyncio.create_task(pair.server.ask(ask(checkpoint="here")))
    second = await asyncio.wait_for(pair.clients[0].ask(ask(request=9, checkpoint="there")), DEADLINE)
    answer = await asyncio.wait_for(first, DEADLINE)
    assert answer.quorum == second.quorum
    assert answer.attempt == second.attempt
    assert [m.info.world_size for m in answer.quorum.members] == [2]
    assert await checkpoint_metadata(pair.server.address, 1, None, DEADLINE) == "there"


async def test_ranks_at_different_steps_are_told_so(pair):
    answers = await asyncio.gather(
        pair.server.ask(ask(step=3)), pair.clients[0].ask(ask(step=4)), return_exceptions=True
    )
    for error in answers:
        assert isinstance(error, KeepstepError)
        assert "rank 0 is at step 3" in str(error)
        assert "rank 1 at step 4" in str(error)


async def test_a_rank_that_does_not_ask_is_named_at_the_deadline(pair):
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of this group"):
        await pair.server.ask(ask(timeout_ms=200))
    assert all(not isinstance(answer, Exception) for answer in await pair.ask()), "the group asks again"


async def test_a_request_that_its_rank_gave_up_on_is_forgotten_with_the_next(pair):
    idle = len(pair.server._tasks._running)
    for request in (1, 2, 3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.clients[0].ask(ask(request=request)), 0.05)
    newest = asyncio.create_task(pair.clients[0].ask(ask(request=4)))
    await eventually(lambda: 1 in pair.server._asks.waiting and pair.server._asks.waiting[1][0].request == 4)
    await pair.server.ask(ask())
    assert (await newest).attempt == 1
    await eventually(lambda: len(pair.server._tasks._running) == idle)


async def test_a_rank_that_asks_again_while_the_round_is_open_gets_its_answer():
    async with in_loop(policy=Policy(min_replicas=2)) as lighthouse:
        pair, other = Group(lighthouse, 2), Group(lighthouse, 1, "b:1")
        await pair.start()
        await other.start()
        rank_0 = asyncio.create_task(pair.server.ask(ask()))
        impatient = asyncio.create_task(pair.clients[0].ask(ask()))
        await eventually(lambda: pair.server._requesting)
        impatient.cancel()
        rank_1 = asyncio.create_task(pair.clients[0].ask(ask(request=2)))
        await eventually(lambda: 2 in [one.request for one, _ in pair.server._asks.in_round.values()])
        await other.ask()
        answers = await asyncio.wait_for(asyncio.gather(rank_0, rank_1), DEADLINE)
        assert answers[0].attempt == answers[1].attempt
        await pair.close()
        await other.close()


BACKGROUND = {"min_groups": 2, "grace_ms": 0}


@asynccontextmanager
async def background_pair() -> AsyncIterator[tuple[Lighthouse, Group, Group]]:
    """A group of two ranks, and another group, without which no quorum forms."""
    async with in_loop(policy=Policy(min_replicas=2)) as lighthouse:
        pair, other = Group(lighthouse, 2), Group(lighthouse, 1, "b:1")
        await pair.start()
        await other.start()
        try:
            yield lighthouse, pair, other
        finally:
            await pair.close()
            await other.close()


def begin_ask(pair: Group, rank: int, request: int = 1, **changes: Any) -> asyncio.Task[QuorumPlan]:
    return asyncio.create_task(pair.links[rank].ask(ask(request=request, **BACKGROUND, **changes)))


def is_asking(lighthouse: Lighthouse) -> bool:
    return bool(lighthouse.jobs["default"].core._groups.asking)


async def plans(*asking: asyncio.Task[Any]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*asking), DEADLINE)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_request_that_a_rank_withdraws_ends_for_all_ranks_and_at_the_lighthouse(rank):
    async with background_pair() as (lighthouse, pair, other):
        asking = [begin_ask(pair, 0), begin_ask(pair, 1)]
        await eventually(lambda: is_asking(lighthouse))
        asking[rank].cancel()
        with pytest.raises(TimeoutError, match=f"rank {rank} of this group withdrew its request"):
            await plans(asking[1 - rank])
        await eventually(lambda: not is_asking(lighthouse))
        other_ask = asyncio.create_task(other.ask(**BACKGROUND))
        assert [one.attempt for one in await plans(begin_ask(pair, 0, 2), begin_ask(pair, 1, 2))] == [2, 2]
        await other_ask


@pytest.mark.parametrize("late", [0, 1])
async def test_a_rank_that_finishes_waits_for_one_that_has_still_a_request_in_the_background(late):
    async with background_pair() as (_, pair, other):
        first = begin_ask(pair, 1 - late, 1, final=True)
        await eventually(lambda: list(pair.server._asks.waiting) == [1 - late])
        behind = begin_ask(pair, late)
        await eventually(lambda: len(pair.server._asks.waiting) == 2)
        behind.cancel()
        await eventually(lambda: list(pair.server._asks.waiting) == [1 - late])
        then = begin_ask(pair, late, 2, final=True)
        other_ask = asyncio.create_task(other.ask(final=True, **BACKGROUND))
        for one in (first, then):
            with pytest.raises(JobClosed):
                await plans(one)
        await other_ask


async def test_ranks_that_do_not_agree_on_the_end_are_told_so_at_the_deadline():
    async with background_pair() as (_, pair, _):
        asking = [begin_ask(pair, 0, final=True, timeout_ms=200), begin_ask(pair, 1, timeout_ms=60_000)]
        for one in asking:
            with pytest.raises(KeepstepError, match=r"ranks \[0\] call finish\(\) and the others begin another step"):
                await plans(one)


async def test_a_quorum_that_forms_while_rank_0_withdraws_is_ended_by_the_lighthouse(monkeypatch):
    async with background_pair() as (lighthouse, pair, other):
        asking = [begin_ask(pair, 0), begin_ask(pair, 1)]
        await eventually(lambda: is_asking(lighthouse))
        requests = pair.server._session._session.requests
        answer = requests.answer

        def withdrawn_at_once(number: int, quorum: Quorum) -> None:
            answer(number, quorum)
            asking[0].cancel()

        monkeypatch.setattr(requests, "answer", withdrawn_at_once)
        await other.ask(**BACKGROUND)
        await eventually(lambda: any(isinstance(one, RoundBroken) for one in other.pushes))
        assert asking[0].cancelled()
        await plans(asking[1])  # it has the plan or not, and hears of the broken round too


async def test_votes_are_counted_by_attempt_and_all_must_be_yes(pair):
    (answer, _) = await pair.ask()
    for first, second in ((True, True), (True, False)):
        votes = [RankVote(1, answer.quorum.quorum_id, 0, answer.attempt, ok) for ok in (first, second)]
        decided = await asyncio.gather(pair.server.vote(votes[0], DEADLINE), pair.clients[0].vote(votes[1], DEADLINE))
        assert decided == [first and second] * 2
        (answer, _) = await pair.ask(commit_failures=1)


async def test_a_vote_that_nobody_completes_times_out(pair):
    (answer, _) = await pair.ask()
    vote = RankVote(1, answer.quorum.quorum_id, 0, answer.attempt, True)
    with pytest.raises(TimeoutError, match=r"timed out after .* ranks \[1\] of this group did not vote"):
        await pair.server.vote(vote, 0.1)
    (answer, _) = await pair.ask(commit_failures=1)
    with pytest.raises(TimeoutError, match=r"rank 0 at http://.* did not answer within 0.1 s"):
        await pair.clients[0].vote(replace(vote, attempt=answer.attempt), 0.1)


async def test_a_vote_that_its_rank_gave_up_on_is_forgotten_with_the_next(pair):
    await pair.ask()
    idle = len(pair.server._tasks._running)
    for attempt in (1, 2, 3):
        with pytest.raises(TimeoutError):
            await pair.clients[0].vote(RankVote(1, 1, 0, attempt, True), 0.05)
    vote = RankVote(1, 1, 0, 4, True)
    assert await asyncio.gather(pair.server.vote(vote, DEADLINE), pair.clients[0].vote(vote, DEADLINE)) == [True] * 2
    await eventually(lambda: len(pair.server._tasks._running) == idle)


async def test_a_rank_that_breaks_on_what_it_is_told_says_so(lighthouse, pair):
    def break_down(_: Push) -> None:
        raise TypeError("a bug")

    pair.clients[0]._on_push = break_down
    await lighthouse.jobs["default"].order(EvictOrdered("a", "bad GPU", 0.0, "ann"))
    await eventually(lambda: pair.failed)
    assert "rank 1 failed: TypeError('a bug')" in pair.failed


async def test_a_rank_whose_connection_ends_fails_the_group_and_the_lighthouse_hears_of_it(lighthouse, pair):
    other = Group(lighthouse, 1, "b:1")
    await other.start()
    answers = await asyncio.gather(pair.ask(), other.ask())
    assert [m.replica_id for m in answers[1][0].quorum.members] == ["a:1", "b:1"]
    pair.clients[0]._session.channel.link.abort("test")
    assert (await asyncio.wait_for(other.lost, DEADLINE)).replica_id == "a:1"
    assert any("rank 1 of 2 died" in reason for reason in pair.failed)
    await other.close()


async def test_ranks_that_were_all_frozen_go_on_together(monkeypatch, lighthouse):
    monkeypatch.setattr("keepstep.group.ranks.rank_link.RANK_BEAT", 0.05)
    monkeypatch.setattr("keepstep.group.ranks.rank_link.RANK_SILENCE", 0.5)
    group = Group(lighthouse, 2)
    await group.start()
    time.sleep(1)  # noqa: ASYNC251  as a container that is paused
    assert all(not isinstance(answer, Exception) for answer in await group.ask())
    assert not group.failed
    await group.close()


async def test_a_request_that_cannot_be_sent_is_an_error_for_every_rank(pair):
    answers = await asyncio.gather(
        pair.server.ask(ask(layout=object())), pair.clients[0].ask(ask()), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [TypeError, KeepstepError]
    assert str(answers[1]) == f"TypeError: {answers[0]}"
    assert all(not isinstance(answer, Exception) for answer in await pair.ask()), "the group asks again"


async def test_a_group_server_that_breaks_fails_its_group(pair, monkeypatch):
    def break_down(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(pair.server._votes, "cast", break_down)
    with pytest.raises(SessionClosed, match=r"the group server failed: TypeError\('a bug'\)"):
        await pair.clients[0].vote(RankVote(1, 1, 0, 1, True), DEADLINE)
    await eventually(lambda: len(pair.failed) == 2)


async def test_a_rank_tells_how_far_its_heal_is_and_nobody_minds_when_the_server_is_gone(pair):
    pair.clients[0].healing(Healing(1, 2, 3.0))
    await pair.server.close()
    pair.clients[0].healing(Healing(2, 2, 3.0))
    await pair.clients[0].close()
    assert not pair.failed


async def test_the_lighthouse_is_told_of_the_heals_of_all_ranks_together(pair, lighthouse):
    await pair.ask()

    async def seen(bytes_done: int) -> HealView:
        heals = lighthouse.jobs["default"].core.heals
        await eventually(lambda: [one.bytes_done for one in heals(0.0)] == [bytes_done])
        return heals(0.0)[0]

    pair.server.healing(Healing(30, 100, 10.0, 7, "b:1", "direct", 3.0))
    assert (await seen(30)).bytes_total == 0, "rank 1 has not said how much it takes over"
    pair.clients[0].healing(Healing(50, 200, 40.0, 7, "b:1", "relay", 2.0))
    both = await seen(80)
    assert (both.bytes_total, both.bytes_per_second, both.seconds_left) == (300, 50.0, 220 / 50.0)
    assert (both.step, both.source, both.via) == (7, "b:1", "direct, relay")
    pair.server.healing(Healing(100, 100, 10.0, 7, "b:1", "direct", 10.0, ended=True))
    assert (await seen(150)).bytes_per_second == 40.0, "that of the rank that still heals"
    pair.clients[0].healing(Healing(60, 200, 12.0, 7, "b:1", "relay", 5.0, ended=True, error="the source died"))
    await eventually(lambda: lighthouse.jobs["default"].core.heals(0.0) == ())
    (end,) = [one for one in lighthouse.events.newest("default", 10) if one.kind == "heal_failed"]
    assert (end.detail["bytes"], end.detail["reason"]) == (160, "rank 1: the source died")
    await pair.ask(request=2)
    pair.clients[0].healing(Healing(1, 2, 3.0))
    assert (await seen(1)).bytes_total == 0, "the heal before is forgotten"


async def test_the_lighthouse_is_told_of_the_shards_of_all_ranks_together(pair, lighthouse):
    await pair.ask()

    def seen() -> ShardReport | None:
        return lighthouse.jobs["default"].core.replicas(0.0)[0].shards

    full = (Exposure("b:1", "no memory"),)
    pair.server.shards(one := ShardReport(1, 0, 4, 0, "fresh", 0, 0.5, 100, ("b:1",), formed=True))
    pair.clients[0].shards(replace(one, seconds=0.75, copies_bytes=50, exposed=full))
    await eventually(lambda: seen() is not None)
    assert seen() == replace(one, seconds=0.75, copies_bytes=150, exposed=full)
    pair.server.shards(replace(one, world=2, how="unchanged"))
    pair.clients[0].shards(replace(one, copies_bytes=60, formed=False))  # still of the world before
    pair.clients[0].shards(replace(one, world=2, how="unchanged", copies_bytes=70))
    await eventually(lambda: seen().world == 2)
    assert (seen().copies_bytes, seen().exposed) == (170, ())
    assert [one.detail["how"] for one in lighthouse.events.newest("default", 20) if one.kind == "world_formed"] == [
        "fresh",
        "unchanged",
    ]


async def test_a_rank_that_leaves_properly_fails_nobody(pair):
    await pair.clients[0].leave("done", DEADLINE)
    await pair.clients[0].close()
    assert not pair.failed


async def test_a_server_that_is_closed_says_goodbye(pair):
    await pair.server.close()
    with pytest.raises(SessionClosed):
        await pair.clients[0].ask(ask())
    assert not pair.failed


async def test_one_rank_that_was_told_to_leave_takes_the_group_along(pair):
    answers = await asyncio.gather(
        pair.server.ask(ask()), pair.clients[0].ask(ask(leaving="SIGTERM")), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [Leaving, Leaving]
    assert [str(answer) for answer in answers] == ["SIGTERM"] * 2


async def test_a_group_leaves_although_no_lighthouse_takes_its_goodbye(lighthouse, pair):
    await lighthouse.stop()
    answers = await pair.ask(leaving="SIGTERM", timeout_ms=300)
    assert [repr(answer) for answer in answers] == ["Leaving('SIGTERM')"] * 2
    assert [type(answer) for answer in await pair.ask()] == [SessionClosed] * 2, "it has left"


async def test_the_first_difference_of_two_layouts_is_named(pair):
    pair.server.layout_lines = ["a (2,)", "b (3,)"]
    address = pair.server.address
    assert "here 'b (4,)', in a 'b (3,)'" in (await first_layout_difference(address, None, ["a (2,)", "b (4,)"]))[1]
    assert "only in a: 'b (3,)'" in (await first_layout_difference(address, None, ["a (2,)"]))[1]
    assert "does not answer" in (await first_layout_difference("http://127.0.0.1:9", None, ["a (2,)"]))[1]


async def test_a_rank_is_compared_with_the_same_rank_of_another_group(pair):
    address, rank_1 = pair.server.address, pair.clients[0]
    pair.server.layout_lines, rank_1.layout_lines = ["stage 0"], ["stage 1", "b (3,)"]
    rank_1.step_values.add(1, 4, (("all-reduce", "1\texpert 2"),))

    async def difference(lines: list[str], rank: int = 1) -> tuple[list[str], str, bool]:
        return await first_layout_difference(
            address, None, lines, values={"1/4": {"all-reduce 1": "expert 1"}}, rank=rank
        )

    assert await difference(["stage 1", "b (4,)"]) == (
        ["stage 1", "b (3,)"],
        "first difference, entry 1: here 'b (4,)', in a 'b (3,)'",
        False,
    )
    pair.server.layout_changed = True
    assert (await difference(["stage 1", "b (4,)"]))[2], "the layout of the group has changed since its first step"
    assert (await difference(["stage 1", "b (3,)"]))[1] == "all-reduce 1: expert 1 here, expert 2 in a"
    assert (await difference(["stage 1"], rank=5))[0] == []
    assert "rank 5 of a:1 does not answer" in (await difference(["stage 1"], rank=5))[1]
    rank_1.layout_lines = ["b" * 5000] * 1000
    assert (await difference(["stage 1"]))[0] == [], "more than a message may have"
    assert not pair.failed


async def assert_not_failed_by_the_end_of_a_rank(group: Group) -> None:
    idle = len(group.server._tasks._running)
    group.clients[0]._session.disconnect("test")  # a process that ends says no goodbye
    await eventually(lambda: not group.server._connections._ranks)
    await eventually(lambda: len(group.server._tasks._running) == idle)
    assert not [reason for reason in group.failed if "died" in reason]


async def test_the_ranks_of_an_evicted_group_end_in_any_order_and_none_has_failed(lighthouse, pair):
    told = asyncio.get_running_loop().create_future()
    pair.hear = pair.clients[0]._on_push = lambda push: told.done() or told.set_result(push)
    await lighthouse.jobs["default"].order(EvictOrdered("a", "bad GPU", 0.0, "ann"))
    assert await asyncio.wait_for(told, DEADLINE) == Evicted("bad GPU", 0.0)
    await assert_not_failed_by_the_end_of_a_rank(pair)


async def test_the_ranks_of_a_refused_group_end_in_any_order_and_none_has_failed(lighthouse, pair):
    await pair.ask(layout="model")
    other = Group(lighthouse, 2, "b:1")
    await other.start()
    try:
        assert [type(answer) for answer in await other.ask(layout="other model")] == [LayoutMismatch] * 2
        await assert_not_failed_by_the_end_of_a_rank(other)
    finally:
        await other.close()


async def test_a_group_that_lost_a_rank_after_its_start_was_refused_does_not_wait_for_it(pair, monkeypatch):
    async def refuse(_asks: dict[int, RankAsk]) -> QuorumPlan:
        raise StartRefused("the job is at step 7")

    with monkeypatch.context() as patch:
        patch.setattr(pair.server, "_request", refuse)
        assert [type(answer) for answer in await pair.ask()] == [StartRefused] * 2
    asking = asyncio.create_task(pair.server.ask(ask(request=2)))
    await eventually(lambda: list(pair.server._asks.waiting) == [0])
    pair.clients[0]._session.disconnect("test")
    with pytest.raises(SessionClosed, match="rank 1 has left this group: rank 1 of 2 died"):
        await asyncio.wait_for(asking, DEADLINE)
    with pytest.raises(SessionClosed, match=r"ranks \[1\] of this group have left it"):
        await pair.server.ask(ask(request=3))
    assert pair.server._failed == ""
    await pair.clients.pop().close()
    pair.clients.append(await pair.connect(1))
    assert [one.attempt for one in await pair.ask(request=4)] == [1, 1]


async def test_every_rank_knows_the_services_whenever_it_came(lighthouse):
    relay = ServiceAddress("relay", "a", "http://a:1")
    epoch = lighthouse.term.epoch
    await lighthouse.registry.put(epoch, new_record("relay", "a", "http://a:1", 60.0, {}))
    group = Group(lighthouse, 2)
    await group.start()
    try:
        await eventually(lambda: [link.services for link in group.links] == [(relay,)] * 2)
        await lighthouse.registry.delete(epoch, "relay", "a")
        await eventually(lambda: [link.services for link in group.links] == [()] * 2)
        assert lighthouse.registry.addresses() == ()
    finally:
        await group.close()


async def test_a_group_that_waits_says_what_the_lighthouse_waits_for(
    lighthouse: Lighthouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_quorum_log, "SLOW_QUORUM_SECONDS", 0.05)
    first, second = Group(lighthouse, 1, "a:1"), Group(lighthouse, 1, "a:2")
    try:
        await first.start()
        await second.start()
        waiting = asyncio.create_task(second.ask())
        await eventually(lambda: "has the same name" in caplog.text)
        assert "waiting for a quorum" in caplog.text
        assert "--first-replica N" in caplog.text
        await first.close()
        (answer,) = await waiting
        assert not isinstance(answer, Exception), answer
    finally:
        await first.close()
        await second.close()


async def test_a_group_without_a_lighthouse_says_that_it_has_none(
    lighthouse: Lighthouse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_quorum_log, "SLOW_QUORUM_SECONDS", 0.05)
    group = Group(lighthouse, 1)
    try:
        await group.start()
        await lighthouse.stop()
        waiting = asyncio.create_task(group.server.ask(ask()))
        await eventually(lambda: "waiting for a quorum" in caplog.text)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    finally:
        await group.close()
