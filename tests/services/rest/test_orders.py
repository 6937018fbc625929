"""Orders: evict, drain, readmit, a policy; and invalid bodies."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from keepstep_lighthouse.store.contract import WriteFailedError
from keepstep_lighthouse.store.memory_store import MemoryStore
from keepstep_mesh.protocol.membership import StateRoot
from keepstep_mesh.protocol.messages import Closed, Denied, Drain, Evicted, MemberLost, Quorum
from keepstep_mesh.protocol.policy import Policy
from tests.services.rest.scene import JOB, scene
from tests.support.services.lighthouse_driver import DEADLINE, connection, eventually, round_of


def entry_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The entry of the event log in the answer to an order."""
    return {name: value for name, value in answer.items() if name not in ("done", "sentence")}


async def test_evict_ends_the_group_tells_the_others_and_is_in_the_event_log() -> None:
    async with scene() as (_, rest, members):
        event = await rest.post(f"{JOB}/replicas/r1/evict", {"reason": "bad GPU"})
        assert (event["kind"], event["replica_id"]) == ("evicted", "r1")
        facts = {"incarnations": ["r1:1"], "quorum_id": 1}
        assert event["detail"] == {"reason": "bad GPU", "by": "admin at 127.0.0.1", "ban_seconds": 0.0, **facts}
        assert await members[1].next(Evicted) == Evicted("bad GPU", 0.0)
        await members[1].ended()
        assert "evicted by admin" in (await members[0].next(MemberLost)).reason
        assert (event["done"], event["sentence"]) == (True, "r1 is evicted")
        assert entry_of(event) in (await rest.get(f"{JOB}/events"))["events"]
        assert (await rest.get(f"{JOB}/replicas/r1"))["state"] == "gone"
        for target in ("r1", "r1:1"):
            again = await rest.post(f"{JOB}/replicas/{target}/evict", {"reason": "again"})
            assert entry_of(again) == entry_of(event)
            assert (again["done"], again["sentence"]) == (
                False,
                f"nothing to do: {target} has left and is evicted already",
            )
        kinds = [one["kind"] for one in (await rest.get(f"{JOB}/events"))["events"]]
        assert kinds.count("evicted") == 1


async def test_an_eviction_of_a_group_that_is_gone_is_an_event_so_that_it_counts_as_lost_no_longer() -> None:
    async with scene() as (_, rest, members):
        await rest.post(f"{JOB}/replicas/r1/evict", {"reason": "bad GPU"})
        await members[1].ended()
        assert (await rest.post(f"{JOB}/replicas/r1/readmit"))["sentence"] == "r1:1 may connect again"
        again = await rest.post(f"{JOB}/replicas/r1/evict", {"reason": "again"})
        assert (again["done"], again["replica_id"]) == (True, "r1:1")
        assert again["sentence"] == "no group r1 is connected; r1 counts as lost no longer"


async def test_a_ban_keeps_the_name_out_until_it_is_readmitted() -> None:
    async with scene() as (one, rest, _members):
        await rest.post(f"{JOB}/replicas/r1/evict", {"reason": "bad host", "ban_seconds": 500})
        banned = await rest.post(f"{JOB}/replicas/never-seen/evict", {"reason": "bad host", "ban_seconds": 500})
        assert banned["sentence"] == "no group never-seen is connected; never-seen is banned for 500 s"
        assert [ban["target"] for ban in (await rest.get(JOB))["bans"]] == ["r1", "never-seen"]
        async with connection(one.address, "r1:2") as banned:
            await banned.hello()
            assert (await banned.refusal()).code == "banned"
        event = await rest.post(f"{JOB}/replicas/r1/readmit")
        assert (event["kind"], event["detail"]) == ("readmitted", {"by": "admin at 127.0.0.1", "quorum_id": 1})
        again = await rest.post(f"{JOB}/replicas/r1/readmit", {})
        assert entry_of(again) == entry_of(event)
        assert (again["done"], again["sentence"]) == (False, "nothing to do: r1 is neither banned nor evicted")
        async with connection(one.address, "r1:2") as welcome:
            await welcome.hello()
            await eventually(lambda: len(one.sessions) == 2)


async def test_drain_asks_the_group_to_leave_and_once_is_enough() -> None:
    async with scene() as (_, rest, members):
        event = await rest.post(f"{JOB}/replicas/r0/drain", {"reason": "maintenance"})
        assert (event["kind"], event["replica_id"]) == ("drain", "r0:1")
        assert await members[0].next(Drain) == Drain("maintenance")
        assert (await rest.get(f"{JOB}/replicas/r0"))["draining"] is True
        again = await rest.post(f"{JOB}/replicas/r0%3A1/drain", {"reason": "again"})
        assert entry_of(again) == entry_of(event)
        assert (again["done"], again["sentence"]) == (False, "nothing to do: r0:1 is draining already")


async def test_a_closed_job_is_reopened_once_and_its_groups_train_on() -> None:
    async with scene() as (_, rest, members):
        problem = await rest.post(f"{JOB}/reopen", status=409)
        assert problem["detail"] == "job job is not closed: its groups have not finished together"
        for member in members:
            await member.ask(3, lineage=1, final=True)
        for member in members:
            assert (await member.until(Closed)).state.step == 3
        assert (await rest.get(JOB))["state"]["code"] == "closed"
        await members[0].ask(3, lineage=1)
        assert "keepstep job reopen" in (await members[0].until(Denied)).reason
        event = await rest.post(f"{JOB}/reopen")
        assert (event["kind"], event["replica_id"]) == ("reopened", "")
        assert event["detail"] == {"by": "admin at 127.0.0.1", "step": 3}
        assert (event["done"], event["sentence"]) == (True, "job job may train on from a checkpoint of step 3")
        again = await rest.post(f"{JOB}/reopen")
        assert entry_of(again) == entry_of(event)
        assert (again["done"], again["sentence"]) == (False, "nothing to do: job job is not closed")
        for member in members:
            await member.ask(3, lineage=1)
        for member in members:
            assert (await member.until(Quorum)).step == 3


async def test_a_policy_is_changed_at_once_and_twice_is_once() -> None:
    async with scene(2, policy=Policy(min_replicas=2, reconnect_grace=DEADLINE)) as (_, rest, members):
        before = (await rest.get(JOB))["policy"]
        unchanged = {"job": "job", "policy": before, "event": None}
        assert await rest.patch(JOB, {"min_replicas": 2}) == unchanged, "it was so from the beginning"
        members[1].cut()
        await members[0].ask(1, commit_failures=1)
        changed = await rest.patch(JOB, {"min_replicas": 1, "join_timeout": 0.0, "takeover_grace": 3})
        answer = await members[0].until(Quorum)
        assert [member.replica_id for member in answer.members or ()] == ["r0:1"], "the one that waited is answered"
        policy = {**before, "min_replicas": 1, "join_timeout": 0.0, "takeover_grace": 3}
        assert (await rest.get(JOB))["policy"] == changed["policy"] == policy
        event = changed["event"]
        assert (event["kind"], event["replica_id"], event["detail"]) == (
            "policy",
            "",
            {
                "by": "admin at 127.0.0.1",
                "changed": {"min_replicas": 1, "join_timeout": 0.0, "takeover_grace": 3},
                "before": {"min_replicas": 2, "join_timeout": 60.0, "takeover_grace": None},
                "quorum_id": 1,
            },
        )
        assert await rest.patch(JOB, {"min_replicas": 1}) == {**changed, "event": None}, "nothing was to be done"
        assert [one for one in (await rest.get(f"{JOB}/events"))["events"] if one["kind"] == "policy"] == [event]
        again = await rest.patch(JOB, {"takeover_grace": None})
        assert again["policy"]["takeover_grace"] is None
        assert again["event"]["id"] > event["id"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no field of the policy: expected one of min_replicas, max_replicas, initial_replicas"),
        (b'{"min_replica": 1}', "unknown field 'min_replica'; known fields"),
        (b'{"min_replicas": 1.5}', "min_replicas must be a whole number, not 1.5"),
        (b'{"min_replicas": null}', "min_replicas must be a whole number, not None"),
        (b'{"min_replicas": true}', "min_replicas must be a whole number, not True"),
        (b'{"min_replicas": 0}', "min_replicas must be at least 1"),
        (b'{"min_replicas": ' + b"9" * 400 + b"}", "min_replicas must be at least 1 (at most"),
        (b'{"max_replicas": 1, "min_replicas": 2}', "max_replicas 1 is less than min_replicas 2"),
        (b'{"join_timeout": "60s"}', "join_timeout must be a number, not '60s'"),
        (b'{"join_timeout": NaN}', "join_timeout must be a time"),
        (b'{"heal_timeout": 1e300}', "heal_timeout must be a time"),
        (b'{"heartbeat_timeout": 0.001}', "groups that are alive would be lost"),
        (b'{"takeover_grace": "none"}', "takeover_grace must be a number or null"),
    ],
)
async def test_a_policy_that_will_not_do_is_a_problem_and_changes_nothing(body: bytes, said: str) -> None:
    async with scene(1) as (one, rest, _members):
        before = one.jobs["job"].core.record
        assert said in (await rest.call("PATCH", JOB, 400, data=body))["detail"]
        assert one.jobs["job"].core.record == before
        await rest.patch("/v1/jobs/elsewhere", {"min_replicas": 1}, 404)


async def test_a_policy_that_cannot_be_written_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> bool:
        raise WriteFailedError("the disk is full")

    async with scene(1) as (one, rest, _members):
        with monkeypatch.context() as planted:
            planted.setattr(MemoryStore, "transact", full)
            await rest.patch(JOB, {"min_replicas": 7}, 503)
        await eventually(lambda: one.term is not None)
        assert (await rest.get(JOB))["policy"]["min_replicas"] == 1


async def test_an_order_that_can_do_nothing_says_why() -> None:
    async with scene() as (_, rest, members):
        await rest.post(f"{JOB}/replicas/r1:1/evict", {"reason": "x"})
        await members[1].ended()
        problem = await rest.post(f"{JOB}/replicas/r1/drain", {"reason": "x"}, 409)
        assert "has left already" in problem["detail"]
        problem = await rest.post(f"{JOB}/replicas/r0/readmit", {}, 409)
        assert problem["detail"] == "r0 is neither banned nor evicted"


@pytest.mark.parametrize(
    ("order", "body", "said"),
    [
        ("evict", b"{", "the body is not JSON"),
        ("evict", b"\xff\xfe", "the body is not JSON"),
        ("evict", b"[" * 100_000, "the body is not JSON"),
        ("evict", rb'{"reason": "\ud800"}', "surrogates not allowed"),
        ("evict", b"[]", "must be a JSON object"),
        ("evict", b"", "a field is missing; known fields: ban_seconds, reason"),
        ("evict", b'{"reason": 5}', "reason must be text, not 5"),
        ("evict", b'{"reason": null}', "reason must be text"),
        ("evict", b'{"reason": "x", "ban_seconds": "1"}', "ban_seconds must be a number"),
        ("evict", b'{"reason": "x", "ban_seconds": true}', "ban_seconds must be a number"),
        ("evict", b'{"reason": "x", "ban_seconds": -1}', "ban_seconds must be between"),
        ("evict", b'{"reason": "x", "ban_seconds": NaN}', "ban_seconds must be between"),
        ("evict", b'{"reason": "x", "ban_seconds": 1e300}', "ban_seconds must be between"),
        ("evict", b'{"reason": "x", "ban_seconds": ' + b"9" * 400 + b"}", "ban_seconds must be between"),
        ("evict", b'{"reason": "x", "for": 1}', "unknown field 'for'"),
        ("drain", b'{"ban_seconds": 1, "reason": "x"}', "unknown field 'ban_seconds'; known fields: reason"),
        ("drain", json.dumps({"reason": "x" * 1001}).encode(), "(limit 1000)"),
        ("readmit", b'{"reason": "x"}', "unknown field 'reason'; known fields: none"),
        (
            "straggler",
            b'{"steps": 9, "seconds": 1}',
            "a field is missing; known fields: median_seconds, seconds, steps",
        ),
        ("straggler", b'{"steps": 9, "seconds": NaN, "median_seconds": 1}', "must be between 0 and"),
        ("straggler", b'{"steps": -1, "seconds": 1, "median_seconds": 1}', "must be between 0 and"),
    ],
)
async def test_a_body_that_will_not_do_is_a_problem_that_names_the_field(order: str, body: bytes, said: str) -> None:
    async with scene() as (one, rest, _members):
        problem = await rest.call("POST", f"{JOB}/replicas/r0/{order}", 400, data=body)
        assert said in problem["detail"]
        assert len(one.sessions) == 2


async def test_a_body_without_end_is_cut_off() -> None:
    async with scene(1) as (_, rest, _members):
        problem = await rest.call("POST", f"{JOB}/replicas/r0/evict", 413, data=io.BytesIO(b" " * 3_000_000))
        assert problem["status"] == 413


async def test_groups_are_compared_once_for_each_order_that_came_before_their_roots_were_asked_for() -> None:
    async with scene() as (_, rest, members):
        orders = [await rest.post(f"{JOB}/verify") for _ in range(2)]
        assert [one["detail"] for one in orders] == [
            {"by": "admin at 127.0.0.1", "order": 1},
            {"by": "admin at 127.0.0.1", "order": 2},
        ]
        assert orders[0]["done"]
        assert [one.verify for one in await round_of(members, step=1)] == [True, True]
        third = await rest.post(f"{JOB}/verify")
        root = StateRoot(1, 1, "aa")
        assert [one.verify for one in await round_of(members, step=2, root=root)] == [True, True]
        (found,) = [one for one in (await rest.get(f"{JOB}/events"))["events"] if one["kind"] == "replicas_verified"]
        assert found["detail"]["order"] == 2 < third["detail"]["order"]
        assert found["detail"]["roots"] == {"aa": ["r0:1", "r1:1"]}


@pytest.mark.parametrize(
    "body",
    [
        {"verify_every": -1},
        {"verify_every": 1.5},
        {"on_divergence": "hope"},
        {"on_divergence": None},
        {"drain_straggler_after": -1},
        {"drain_straggler_after": 10**10},
    ],
)
async def test_a_policy_of_comparing_that_will_not_do_is_refused(body: dict[str, Any]) -> None:
    async with scene() as (_, rest, _members):
        problem = await rest.patch(JOB, body, 400)
        assert next(iter(body)) in problem["detail"]


async def test_a_straggler_is_drained_as_the_policy_says_and_else_the_reason_is_told() -> None:
    said = {"steps": 7, "seconds": 0.5, "median_seconds": 0.1}
    async with scene(3) as (_, rest, members):
        for step in (1, 2):
            await round_of(members, step)
        problem = await rest.post(f"{JOB}/replicas/r2:1/straggler", said, 409)
        assert problem["detail"].startswith("r2:1 is not drained: the policy does not drain stragglers")
        await rest.patch(JOB, {"drain_straggler_after": 2})
        assert "not a member of the quorum" in (await rest.post(f"{JOB}/replicas/r2/straggler", said, 409))["detail"]
        event = await rest.post(f"{JOB}/replicas/r2:1/straggler", said)
        assert (event["kind"], event["replica_id"], event["done"]) == ("drain", "r2:1", True)
        told = await members[2].until(Drain)
        assert told.reason == event["detail"]["reason"]
        assert "a straggler for 7 steps in a row: it needs 0.5 s for a step, the median" in told.reason
        problem = await rest.post(f"{JOB}/replicas/r1:1/straggler", said, 409)
        assert "r2:1 is draining, and groups drain one at a time" in problem["detail"]
