"""Sessions as they are on the wire: what each frame is answered with, to whom, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgpack
import pytest

from keepstep_lighthouse.jobs import sessions, welcomed
from keepstep_lighthouse.jobs.lighthouse_node import HIGHEST_EPOCH_SEEN
from keepstep_lighthouse.quorum.events import PolicyOrdered
from keepstep_mesh.net.addresses import outward_address
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import HeldAnswer, MemberInfo
from keepstep_mesh.protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    CancelRequest,
    Denied,
    Failed,
    Goodbye,
    Healing,
    Heartbeat,
    Leave,
    MemberLost,
    Moved,
    Quorum,
    Refused,
    RoundBroken,
    Timing,
    Welcome,
)
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.lighthouse_driver import (
    DEADLINE,
    connection,
    eventually,
    lighthouse,
    round_of,
    worker,
    workers,
)

PATIENT = Policy(min_replicas=1, reconnect_grace=DEADLINE)
"""A connection that ends is no loss for as long as a test takes."""


# ---- quorums


async def test_a_group_at_loopback_and_one_at_the_address_of_the_machine_train_together() -> None:
    own = outward_address()
    async with lighthouse(bind="0.0.0.0:0", insecure=True, policy=Policy(min_replicas=2)) as one:
        port = one.address.rpartition(":")[2]
        async with (
            worker(f"http://127.0.0.1:{port}", "r0:1") as near,
            worker(f"http://{own}:{port}", "r1:1") as far,
        ):
            await near.ask(info=MemberInfo("http://127.0.0.1:1"))
            await far.ask(info=MemberInfo(f"http://{own}:1"))
            for group in (near, far):
                assert len((await group.until(Quorum)).members or ()) == 2


async def test_the_member_list_travels_only_when_it_changed() -> None:
    async with lighthouse(policy=Policy(min_replicas=2)) as one, workers(one.address, 2) as members:
        first = await round_of(members)
        assert [[m.replica_id for m in answer.members or ()] for answer in first] == [["r0:1", "r1:1"]] * 2
        second = await round_of(members, 1)
        third = await round_of(members, 2)
        for answer in (*second, *third):
            assert (answer.uniform, answer.listed) == (True, ())
            assert (answer.quorum_id, answer.version) == (first[0].quorum_id, second[0].version)
        assert [answer.step for answer in third] == [2, 2]

        async with worker(one.address, "r2:1") as joiner:
            await joiner.ask(0)
            joined = [*await round_of(members, 3), await joiner.next(Quorum)]
        assert {answer.quorum_id for answer in joined} == {first[0].quorum_id + 1}
        assert {len(answer.members or ()) for answer in joined} == {3}


async def test_a_group_that_reconnects_gets_the_list_and_the_others_do_not() -> None:
    async with lighthouse(policy=PATIENT) as one, workers(one.address, 2) as members:
        await round_of(members, 0)
        before = await round_of(members, 1)
        members[1].cut()
        async with worker(one.address, "r1:1", epoch_seen=1, quorum_id_seen=before[0].quorum_id) as back:
            await members[0].ask(2)
            await back.ask(2, request=3)
            answers = [await members[0].next(Quorum), await back.next(Quorum)]
        assert [answer.quorum_id for answer in answers] == [before[0].quorum_id] * 2
        assert (answers[0].uniform, answers[0].listed) == (True, ())
        assert [member.step for member in answers[1].members or ()] == [2, 2]


async def test_a_member_that_is_behind_makes_everybody_get_the_list() -> None:
    async with lighthouse(policy=Policy(min_replicas=2)) as one, workers(one.address, 2) as members:
        await round_of(members, 0)
        await members[0].ask(5, lineage=1)
        await members[1].ask(0)
        answers = [await member.next(Quorum) for member in members]
        assert [(m.step, m.lineage) for m in answers[0].members or ()] == [(5, 1), (0, "")]
        assert answers[0].members == answers[1].members
        assert (answers[0].step, answers[0].lineage) == (5, 1)


async def test_a_request_that_is_resent_is_answered_again_and_makes_no_new_round() -> None:
    async with lighthouse(policy=PATIENT) as one, workers(one.address, 2) as members:
        first = await round_of(members, 0)
        members[1].cut()
        async with worker(one.address, "r1:1", epoch_seen=1) as back:
            await back.ask(0, request=1)
            again = await back.next(Quorum)
            assert (again.quorum_id, again.request, again.members) == (first[1].quorum_id, 1, first[1].members)
            assert one.jobs["job"].core.record.quorum_id == first[0].quorum_id
            await members[0].ask(1)
            await back.ask(1, request=2)
            answers = [await members[0].next(Quorum), await back.next(Quorum)]
        assert {answer.quorum_id for answer in answers} == {first[0].quorum_id}


async def test_a_cancelled_request_is_not_in_the_next_quorum() -> None:
    async with lighthouse(policy=Policy(min_replicas=1, join_timeout=0.05)) as one, workers(one.address, 3) as members:
        await members[0].ask(0)
        await members[0].send(CancelRequest(1))
        await members[1].ask(0)
        await members[2].ask(0)
        for member in members[1:]:
            answer = await member.next(Quorum)
            assert [m.replica_id for m in answer.members or ()] == ["r1:1", "r2:1"]
            assert answer.joiners == 1


async def test_a_request_ends_at_its_deadline_with_the_reason() -> None:
    async with lighthouse(policy=Policy(min_replicas=3)) as one, worker(one.address) as alone:
        await alone.ask(0, timeout_ms=50)
        denied = await alone.next(Denied)
        assert (denied.request, denied.code) == (1, "deadline")
        assert denied.reason == "1 of at least 3 groups have asked for a quorum"


async def test_jobs_do_not_see_each_other() -> None:
    async with (
        lighthouse(policy=Policy(min_replicas=1)) as one,
        worker(one.address, "r0:1", "red") as red,
        worker(one.address, "r0:1", "blue") as blue,
    ):
        answers = [*await round_of([red]), *await round_of([blue], 7)]
        assert [[m.replica_id for m in answer.members or ()] for answer in answers] == [["r0:1"]] * 2
        assert [answer.step for answer in answers] == [0, 7]
        assert sorted(one.jobs) == ["blue", "red"]


async def test_data_of_a_member_reaches_the_others_as_it_is() -> None:
    data = {"ports": [1, 2], b"raw": b"\xff", "none": None, "deep": [[["x"]]]}
    async with lighthouse(policy=Policy(min_replicas=2)) as one, workers(one.address, 2) as members:
        info = MemberInfo("http://a", "http://b", 4, "layout", data, rendezvous=2)
        answers = await round_of(members, 0, info=info)
        assert [member.info for member in answers[0].members or ()] == [info] * 2


# ---- coming and going


async def test_the_welcome_tells_what_the_worker_has_to_know() -> None:
    policy = Policy(heartbeat_timeout=4.0, reconnect_grace=0.3)
    async with lighthouse(policy=policy) as one, worker(one.address, heartbeat_interval_ms=100) as polite:
        assert polite.welcome == Welcome(
            *(PROTOCOL_VERSION, 1, 0, 400, 4000, 300, polite.welcome.lighthouse), heal_timeout_ms=60_000
        )


@pytest.mark.parametrize(("asked", "told"), [(0, 500), (100, 500), (1200, 1200), (60_000, 1666)])
async def test_the_heartbeat_interval_leaves_room_for_lost_ones(asked: int, told: int) -> None:
    async with lighthouse() as one, worker(one.address, heartbeat_interval_ms=asked) as someone:
        assert someone.welcome.heartbeat_interval_ms == told


async def test_a_change_of_the_heartbeats_reaches_the_workers_that_are_there() -> None:
    async with (
        lighthouse(policy=Policy(heartbeat_timeout=60.0)) as one,
        worker(one.address, "r0:1", heartbeat_interval_ms=100) as member,
    ):
        job = one.jobs["job"]
        assert member.welcome.heartbeat_interval_ms == 6000
        await job.order(PolicyOrdered(replace(job.core.record.policy, heartbeat_timeout=2.0, min_replicas=2), "ann"))
        assert await member.next(Timing) == Timing(200, 2000, 200, 60_000)


async def test_a_connection_that_ends_without_a_word_is_a_loss_after_the_grace() -> None:
    policy = Policy(min_replicas=1, reconnect_grace=0.05)
    async with lighthouse(policy=policy) as one, workers(one.address, 3) as members:
        quorum_id = (await round_of(members))[0].quorum_id
        members[1].cut()
        for other in (members[0], members[2]):
            lost = await other.next(MemberLost)
            assert (lost.quorum_id, lost.replica_id) == (quorum_id, "r1:1")
        answers = await round_of([members[0], members[2]], 0, commit_failures=1)
        assert {answer.quorum_id for answer in answers} == {quorum_id + 1}


async def test_most_of_a_quorum_that_report_it_broken_end_the_grace() -> None:
    async with lighthouse(policy=PATIENT) as one, workers(one.address, 3) as members:
        await round_of(members)
        members[1].cut()
        for other in (members[0], members[2]):
            await other.ask(0, commit_failures=1)
        for other in (members[0], members[2]):
            await other.until(MemberLost)
            answer = await other.next(Quorum)
            assert [m.replica_id for m in answer.members or ()] == ["r0:1", "r2:1"]


async def test_silence_is_a_loss_although_the_connection_stands() -> None:
    policy = Policy(min_replicas=1, heartbeat_timeout=0.5)
    async with lighthouse(policy=policy) as one, workers(one.address, 2) as members:
        await round_of(members)

        async def beat() -> None:
            while True:
                await members[0].send(Heartbeat())
                await asyncio.sleep(0.05)  # a tenth of the heartbeat timeout

        beating = asyncio.create_task(beat())
        assert (await members[0].next(MemberLost)).replica_id == "r1:1"
        await members[1].ended()
        beating.cancel()
        await asyncio.wait((beating,))


@pytest.mark.parametrize(("said", "answer"), [(Leave("done"), Goodbye), (Moved(), None)])
async def test_a_graceful_leave_is_no_loss(said: codec.Message, answer: type | None) -> None:
    async with lighthouse(policy=PATIENT) as one, workers(one.address, 2) as members:
        first = (await round_of(members))[0]
        await members[1].send(said)
        if answer is not None:
            await members[1].next(answer)
        await members[1].ended()
        (after,) = await round_of([members[0]], 1)
        assert [m.replica_id for m in after.members or ()] == ["r0:1"]
        assert after.quorum_id == first.quorum_id + 1


async def test_a_group_that_says_it_failed_is_lost_without_grace() -> None:
    async with lighthouse(policy=PATIENT) as one, workers(one.address, 2) as members:
        await round_of(members)
        await members[1].send(Failed("rank 1 died"))
        lost = await members[0].next(MemberLost)
        assert "rank 1 died" in lost.reason
        await members[1].ended()


async def test_a_quorum_waits_for_a_group_that_heals() -> None:
    async with lighthouse(policy=Policy(min_replicas=1, join_timeout=0.01)) as one, workers(one.address, 2) as members:
        await round_of(members)
        await members[1].send(Healing(5, 10, 1.0))
        await members[0].ask(1)
        await members[0].send(Heartbeat())
        await members[1].send(Heartbeat())
        await eventually(lambda: one.jobs["job"].core.reason(0.0).code == "healing")
        await members[1].ask(1)
        for member in members:
            await member.next(Quorum)
        assert one.jobs["job"].core.record.members == ("r0:1", "r1:1")


async def test_the_same_incarnation_again_replaces_its_session() -> None:
    async with lighthouse() as one, worker(one.address) as old, worker(one.address, epoch_seen=1) as new:
        refused = await old.refusal()
        assert refused.code == "replaced"
        await round_of([new])
        assert len(one.sessions) == 1


async def test_an_answer_of_a_quorum_that_is_over_is_told_to_be_broken() -> None:
    async with lighthouse() as one, worker(one.address) as first:
        await round_of([first])
        await round_of([first], 0, commit_failures=1)
        async with worker(one.address, "r1:1", epoch_seen=1, held=HeldAnswer(1, 1, 0)) as late:
            assert (await late.next(RoundBroken)).quorum_id == 1


async def test_stopping_tells_the_workers_that_the_lighthouse_goes_away() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with lighthouse() as one:
            members = await stack.enter_async_context(workers(one.address, 2))
            ends = [asyncio.create_task(member.ended()) for member in members]
        assert await asyncio.gather(*ends) == [1001, 1001]


# ---- the store was restored, or is new


@pytest.mark.parametrize(("seen", "epoch"), [(0, 1), (1, 2), (7, 8)])
async def test_the_epoch_is_above_every_epoch_that_a_worker_met_elsewhere(seen: int, epoch: int) -> None:
    async with lighthouse() as one, worker(one.address, epoch_seen=seen) as first:
        assert first.welcome.epoch == epoch
        async with worker(one.address, "r1:1", epoch_seen=seen) as second:
            assert second.welcome.epoch == epoch


async def test_a_report_of_the_highest_epoch_spoils_no_later_takeover(tmp_path: Path) -> None:
    seen = HIGHEST_EPOCH_SEEN
    for _ in range(3):
        async with lighthouse(store=f"sqlite://{tmp_path}/x.db") as one, worker(one.address, epoch_seen=seen) as back:
            assert back.welcome.epoch == seen + 1
            seen = back.welcome.epoch


async def test_the_epoch_is_above_what_a_known_process_met_elsewhere() -> None:
    async with lighthouse() as one:
        for replica_id, seen, epoch in (
            ("r0:1", 0, 1),
            ("r0:1", 1, 1),
            ("r1:1", 2, 3),
            ("r0:1", 3, 4),
            ("r0:1", 9, 10),
        ):
            async with worker(one.address, replica_id, epoch_seen=seen) as back:
                assert back.welcome.epoch == epoch
            await eventually(lambda: not one.sessions)


async def test_processes_that_left_last_are_the_ones_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(welcomed, "MAX_LEFT", 3)
    async with lighthouse(policy=PATIENT) as one:
        for number in range(4):
            async with worker(one.address, f"r{number}:1"):
                pass
            await eventually(lambda: not one.sessions)
        for number, epoch in ((1, 1), (3, 1), (0, 2)):
            async with worker(one.address, f"r{number}:1", epoch_seen=1) as back:
                assert back.welcome.epoch == epoch


async def test_a_process_is_not_forgotten_while_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(welcomed, "MAX_LEFT", 1)
    async with lighthouse(policy=PATIENT) as one, worker(one.address, "r0:1") as old:
        for number in range(1, 4):
            async with worker(one.address, f"r{number}:1"):
                pass
        async with worker(one.address, "r0:1", epoch_seen=1) as back:
            assert back.welcome.epoch == 1
            assert (await old.refusal()).code == "replaced"
        await eventually(lambda: not one.sessions)
        async with worker(one.address, "r0:1", epoch_seen=1) as back:
            assert back.welcome.epoch == 1


async def test_raising_the_epoch_reaches_those_who_are_there_with_their_next_answer() -> None:
    async with lighthouse(policy=Policy(min_replicas=2)) as one, workers(one.address, 2) as members:
        await round_of(members)
        await round_of(members, 1)
        async with worker(one.address, "r2:1", epoch_seen=40, quorum_id_seen=90) as newcomer:
            assert (newcomer.welcome.epoch, newcomer.welcome.quorum_id) == (41, 90)
            await newcomer.ask(2)
            answers = [*await round_of(members, 2), await newcomer.next(Quorum)]
        assert {(answer.epoch, answer.quorum_id) for answer in answers} == {(41, 91)}
        assert {len(answer.members or ()) for answer in answers} == {3}


async def test_frames_that_come_before_the_welcome_are_not_lost() -> None:
    async with lighthouse() as one, connection(one.address) as eager:
        await eager.hello(epoch_seen=5)
        await eager.ask(0)
        assert (await eager.next(Welcome)).epoch == 6
        assert (await eager.next(Quorum)).epoch == 6


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (
            {"version": OLDEST_PROTOCOL_VERSION - 1, "oldest_version": 1},
            "version_too_old",
            f"this lighthouse needs at least {OLDEST_PROTOCOL_VERSION}: update",
        ),
        ({"version": 9, "oldest_version": 9}, "version_too_new", "update the lighthouses first"),
        ({"replica_id": ""}, "bad_message", "replica_id must be"),
        ({"replica_id": "x" * 257}, "bad_message", "replica_id must be"),
        ({"replica_id": "r0\n"}, "bad_message", "replica_id must be"),
        ({"epoch_seen": HIGHEST_EPOCH_SEEN + 1}, "bad_message", "restart this group"),
        ({"epoch_seen": 2**40}, "bad_message", "invalid epoch"),
        ({"quorum_id_seen": 2**60}, "bad_message", "invalid quorum_id"),
    ],
)
async def test_a_hello_that_will_not_do_is_refused_with_the_reason(changes: dict, code: str, said: str) -> None:
    async with lighthouse() as one, connection(one.address) as stranger:
        await stranger.hello(**changes)
        refused = await stranger.refusal()
        assert (refused.code, said in refused.reason) == (code, True), refused


async def test_a_worker_of_the_release_before_takes_part() -> None:
    async with lighthouse() as one, worker(one.address) as newer, connection(one.address, "r1:1") as older:
        for message in (
            ["hello", OLDEST_PROTOCOL_VERSION, 1, "r1:1"],
            ["ask", 1, 0, "", False, 0, 60_000, ["http://r1:1"]],
        ):
            await older.socket.send_bytes(msgpack.packb(message))
        assert (await older.next(Welcome)).version == PROTOCOL_VERSION
        await newer.ask(0)
        assert (await older.until(Quorum)).members == (await newer.until(Quorum)).members


async def test_a_newer_worker_that_still_speaks_our_version_is_welcome() -> None:
    async with lighthouse() as one, worker(one.address, version=9, oldest_version=1) as newer:
        assert newer.welcome.version == PROTOCOL_VERSION


@pytest.mark.parametrize("message", [Heartbeat(), Leave("x"), Goodbye(), Refused("banned", "x")])
async def test_a_session_begins_with_a_hello(message: codec.Message) -> None:
    async with lighthouse() as one, connection(one.address) as stranger:
        await stranger.send(message)
        refused = await stranger.refusal()
        assert "begins with 'hello'" in refused.reason


@pytest.mark.parametrize("message", [Goodbye(), MemberLost(1, "r0", "x"), Welcome(1, 1, 1, 1, 1, 1)])
async def test_messages_for_workers_are_refused(message: codec.Message) -> None:
    async with lighthouse() as one, worker(one.address) as confused:
        await confused.send(message)
        refused = await confused.refusal()
        assert (refused.code, message.kind in refused.reason) == ("bad_message", True)


async def test_a_second_hello_is_refused() -> None:
    async with lighthouse() as one, worker(one.address) as confused:
        await confused.hello()
        assert "unexpected message 'hello'" in (await confused.refusal()).reason


async def test_no_hello_within_its_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELLO_SECONDS", 0.05)
    async with lighthouse() as one, connection(one.address) as mute:
        assert "no hello within" in (await mute.refusal()).reason
        assert one.bad_messages.total == 1


@pytest.mark.parametrize("job", ["%20", "a%2Fb", "-x", "x" * 129, "%C3%A4"])
async def test_a_name_of_a_job_that_will_not_do_is_a_problem_before_the_upgrade(job: str) -> None:
    async with lighthouse() as one, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"{one.address}/v1/jobs/{job}/session")
        assert refused.value.status == 400
        assert not one.jobs


async def test_a_job_that_nobody_ever_trained_is_forgotten_with_its_last_session() -> None:
    async with lighthouse() as one:
        async with worker(one.address, job="typo"):
            assert "typo" in one.jobs
        await eventually(lambda: not one.jobs)
        async with worker(one.address, job="real") as real:
            await round_of([real])
        await eventually(lambda: not one.sessions)
        assert list(one.jobs) == ["real"]
