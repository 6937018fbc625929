"""The session client with the real lighthouse: what a worker lives through in a job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keepstep.session.session_events import Connected, Disconnected
from keepstep_mesh.errors import AuthError, LayoutMismatch, ProtocolError, SessionClosed
from keepstep_mesh.net.http import client_session
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Drain, Evicted, MemberLost, Quorum
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tokens import Tokens
from keepstep_mesh.testing import DEADLINE, ChaosProxy
from tests.support.services.asking_group import Group
from tests.support.services.lighthouse_driver import eventually, lighthouse


@asynccontextmanager
async def groups(count: int, *addresses: str, first: int = 0, token: str | None = None) -> AsyncIterator[list[Group]]:
    """``count`` groups in session, named from ``r<first>`` on."""
    async with contextlib.AsyncExitStack() as stack:
        numbers = range(first, first + count)
        yield [await stack.enter_async_context(Group(*addresses, name=f"r{n}", token=token)) for n in numbers]


async def round_of(members: list[Group], step: int, **changes) -> Quorum:
    """All ask; all get the same quorum."""
    answers = await asyncio.gather(*(one.ask(step, **changes) for one in members))
    assert len({(one.epoch, one.quorum_id, one.members) for one in answers}) == 1
    return answers[0]


async def test_groups_that_ask_get_one_quorum_and_keep_its_number_while_nothing_changes() -> None:
    async with lighthouse() as one, groups(3, one.address) as members:
        first = await round_of(members, 0)
        assert [member.replica_id for member in first.members] == ["r0:1", "r1:1", "r2:1"]
        for step in range(1, 20):
            quorum = await round_of(members, step)
            assert (quorum.quorum_id, quorum.uniform, quorum.step) == (first.quorum_id, True, step)
            assert {(member.step, member.lineage) for member in quorum.members} == {(step, f"state {step}")}


async def test_a_commit_failure_makes_a_new_quorum_of_the_same_members() -> None:
    async with lighthouse() as one, groups(2, one.address) as members:
        first = await round_of(members, 3)
        second = await round_of(members, 3, commit_failures=1)
        assert second.quorum_id == first.quorum_id + 1
        assert [member.commit_failures for member in second.members] == [1, 1]


async def test_a_group_whose_connection_dies_is_news_to_the_others() -> None:
    async with lighthouse() as one, groups(3, one.address) as members:
        quorum = await round_of(members, 0)
        await members[1].session.close()
        for other in (members[0], members[2]):
            lost = await other.push_of(MemberLost)
            assert (lost.replica_id, lost.quorum_id) == ("r1:1", quorum.quorum_id)
        after = await round_of([members[0], members[2]], 1)
        assert after.quorum_id > quorum.quorum_id


async def test_a_connection_that_is_back_within_the_grace_lost_nothing() -> None:
    policy = Policy(reconnect_grace=DEADLINE)
    async with (
        lighthouse(policy=policy) as one,
        ChaosProxy.before(one.address) as proxy,
        groups(3, proxy.url) as members,
    ):
        first = await round_of(members, 0)
        asking = [asyncio.create_task(group.ask(1)) for group in members[:2]]
        proxy.cut()
        for group in members:
            await group.push_of(Disconnected)
            await group.push_of(Connected)
        asking.append(asyncio.create_task(members[2].ask(1)))
        answers = await asyncio.gather(*asking)
        assert {answer.quorum_id for answer in answers} == {first.quorum_id}
        assert all(group.pushes.empty() for group in members)


async def test_a_restarted_lighthouse_goes_on_with_a_higher_epoch_and_the_open_requests(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path / 'store.db'}"
    async with lighthouse(store=store) as one, ChaosProxy.before(one.address) as proxy, groups(2, proxy.url) as members:
        first = await round_of(members, 0)
        asking = asyncio.create_task(members[0].ask(1))
        await asyncio.sleep(0)
        proxy.refuse()
        await one.stop()
        async with lighthouse(bind=one.address.removeprefix("http://"), store=store) as two:
            assert two.address == one.address
            proxy.accept()
            second = await members[1].ask(1)
            assert await asking == second
        assert second.epoch > first.epoch
        assert second.quorum_id >= first.quorum_id


async def test_the_next_address_is_taken_when_a_lighthouse_goes_away(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path / 'store.db'}"
    async with lighthouse(store=store) as one, ChaosProxy.before(one.address) as proxy:
        spare = ChaosProxy.before(one.address)
        async with spare, groups(2, proxy.url, spare.url) as members:
            await round_of(members, 0)
            proxy.refuse()
            for group in members:
                await group.push_of(Connected)
                while group.session.lighthouse != spare.url:
                    await group.push_of(Connected)
            await round_of(members, 1)
            assert {group.session.lighthouse for group in members} == {spare.url}


async def test_a_group_that_leaves_counts_nowhere_at_once() -> None:
    async with lighthouse() as one, groups(3, one.address) as members:
        first = await round_of(members, 0)
        await members[1].session.leave("done", DEADLINE)
        second = await round_of([members[0], members[2]], 1)
        assert second.quorum_id > first.quorum_id
        with pytest.raises(SessionClosed):
            await members[1].ask(1)


async def test_a_group_that_reports_its_failure_is_lost_at_once() -> None:
    async with lighthouse(policy=Policy(reconnect_grace=DEADLINE)) as one, groups(2, one.address) as members:
        await round_of(members, 0)
        await members[1].session.failed("rank 1 died", DEADLINE)
        lost = await members[0].push_of(MemberLost)
        assert "rank 1 died" in lost.reason


async def test_eviction_and_drain_arrive_as_pushes() -> None:
    async with lighthouse() as one, groups(2, one.address) as members, client_session() as http:
        await round_of(members, 0)
        base = f"{one.address}/v1/jobs/job/replicas"
        async with http.post(f"{base}/r0/drain", json={"reason": "node goes down"}) as response:
            assert response.status == 202
        assert (await members[0].push_of(Drain)).reason == "node goes down"
        async with http.post(f"{base}/r1:1/evict", json={"reason": "too slow"}) as response:
            assert response.status == 202
        assert "too slow" in (await members[1].push_of(Evicted)).reason
        with pytest.raises(SessionClosed, match="too slow"):
            await members[1].ask(1)


async def test_a_deadline_says_who_is_missing() -> None:
    async with lighthouse(policy=Policy(min_replicas=2)) as one, groups(1, one.address) as members:
        with pytest.raises(TimeoutError, match="2"):
            await members[0].ask(timeout=0.1)


async def test_a_cancelled_request_is_not_in_the_next_quorum() -> None:
    async with lighthouse(policy=Policy(min_replicas=2)) as one, groups(3, one.address) as members:
        asking = asyncio.create_task(members[0].ask())
        await eventually(lambda: one.jobs["job"].core.quorum_view(0.0).asking == ("r0:1",))
        asking.cancel()
        await asyncio.wait([asking])
        await eventually(lambda: one.jobs["job"].core.quorum_view(0.0).asking == ())
        await members[0].session.leave("gone", DEADLINE)
        quorum = await round_of(members[1:], 0)
        assert [member.replica_id for member in quorum.members] == ["r1:1", "r2:1"]


async def test_a_layout_that_does_not_fit_is_refused_with_a_peer_to_compare_with() -> None:
    async with lighthouse() as one, groups(1, one.address) as (member,):
        await member.ask(info=MemberInfo(address="http://peer:1", layout="abc"))
        async with groups(1, one.address, first=1) as (joiner,):
            with pytest.raises(LayoutMismatch) as raised:
                await joiner.ask(info=MemberInfo(address="http://other:1", layout="xyz"))
        assert raised.value.peer_address == "http://peer:1"


async def test_a_lighthouse_with_tokens_wants_the_workers() -> None:
    tokens = Tokens(worker="w" * 20, admin="a" * 20)
    async with lighthouse(tokens=tokens) as one:
        async with groups(1, one.address, token="w" * 20) as members:
            await members[0].ask()
        with pytest.raises(AuthError, match="KEEPSTEP_TOKEN"):
            async with groups(1, one.address, token="x" * 20):
                pass


async def test_the_name_of_a_job_that_is_none_ends_the_start_at_once_with_the_lighthouses_words() -> None:
    async with lighthouse() as one:
        with pytest.raises(ProtocolError, match=r"answers 400 .*: invalid job name 'no such name': expected"):
            async with Group(one.address, job="no such name"):
                pass
