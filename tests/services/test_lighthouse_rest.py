"""The REST surface: what is read, what is ordered, who may, and that the description tells the truth."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openapi_spec_validator
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

from keepstep_lighthouse import admin
from keepstep_lighthouse.app import Lighthouse, LighthouseSettings
from keepstep_lighthouse.events import Policy
from keepstep_lighthouse.memory import MemoryStore
from keepstep_lighthouse.store import WriteFailedError
from keepstep_mesh import service
from keepstep_mesh.auth import Role, Tokens
from keepstep_mesh.http import application
from keepstep_mesh.messages import Drain, Evicted, Heartbeat, MemberLost, QuorumAnswer
from keepstep_mesh.service import all_routes
from lighthouse_driver import DEADLINE, Worker, connection, eventually, lighthouse, round_of, workers

JOB = "/v1/jobs/job"


class Rest:
    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self.http = http
        self.address = address

    async def get(self, path: str, status: int = 200) -> Any:
        return await self.call("GET", path, status)

    async def post(self, path: str, body: Any = None, status: int = 202) -> Any:
        return await self.call("POST", path, status, json=body)

    async def patch(self, path: str, body: Any, status: int = 202) -> Any:
        return await self.call("PATCH", path, status, json=body)

    async def call(self, method: str, path: str, status: int, **arguments: Any) -> Any:
        async with asyncio.timeout(DEADLINE), self.http.request(method, self.address + path, **arguments) as response:
            body = await response.json(content_type=None)
            assert response.status == status, body
            if status >= 400:
                assert response.content_type == "application/problem+json"
                assert body["status"] == status
            return body


@asynccontextmanager
async def scene(count: int = 2, **settings: Any) -> AsyncIterator[tuple[Lighthouse, Rest, list[Worker]]]:
    """A lighthouse and a job of ``count`` groups that had their first quorum."""
    settings = {"policy": Policy(min_replicas=1, reconnect_grace=DEADLINE), **settings}
    async with (
        lighthouse(**settings) as one,
        aiohttp.ClientSession() as http,
        workers(one.address, count) as members,
    ):
        if members:
            await round_of(members)
        yield one, Rest(http, one.address), members


# ---- reads


async def test_health_readiness_and_metrics() -> None:
    async with scene() as (_, rest, _members):
        assert (await rest.get("/healthz"))["status"] == "ok"
        assert (await rest.get("/readyz"))["status"] == "ready"
        async with rest.http.get(f"{rest.address}/metrics") as response:
            lines = (await response.text()).splitlines()
        for line in (
            "keepstep_lighthouse_ready 1.0",
            "keepstep_lighthouse_epoch 1.0",
            "keepstep_lighthouse_sessions 2.0",
            'keepstep_quorum_id{job="job"} 1.0',
            'keepstep_quorum_members{job="job"} 2.0',
            'keepstep_quorum_rounds_total{job="job"} 1.0',
            'keepstep_groups{job="job",state="training"} 2.0',
        ):
            assert line in lines


async def test_the_cluster_is_told_under_the_address_that_was_asked() -> None:
    async with scene() as (one, rest, _):
        rest.address = rest.address.replace("127.0.0.1", "localhost")
        assert await rest.get("/v1/cluster") == {
            "leader": rest.address,
            "epoch": 1,
            "nodes": [{"address": rest.address, "leads": True, "epoch": 1, "trouble": None}],
            "services": [],
            "store": {"kind": "memory", "trouble": None},
        }
        assert one.address != rest.address


async def test_jobs_and_one_job() -> None:
    async with scene(3) as (_, rest, _members):
        job = await rest.get(JOB)
        assert await rest.get("/v1/jobs") == {"jobs": [job]}
        assert job["policy"]["min_replicas"] == 1
        assert {name: job[name] for name in ("job", "quorum_id", "members", "healthy", "sessions", "bans")} == {
            "job": "job",
            "quorum_id": 1,
            "members": 3,
            "healthy": 3,
            "sessions": 3,
            "bans": [],
        }


async def test_the_quorum_and_why_the_next_is_not_formed() -> None:
    async with scene() as (one, rest, members):
        quorum = await rest.get(f"{JOB}/quorum")
        assert (quorum["quorum_id"], quorum["members"], quorum["epoch"]) == (1, ["r0:1", "r1:1"], 1)
        assert 0 <= quorum["age_seconds"] < DEADLINE
        await members[0].ask(1)
        await eventually(lambda: one.jobs["job"].core.quorum_view(0.0).asking == ("r0:1",))
        reason = (await rest.get(f"{JOB}/quorum"))["reason"]
        assert reason["code"] == "majority"
        assert "r1:1 heartbeats but has not asked" in reason["sentence"]


async def test_replicas_by_name_and_by_incarnation() -> None:
    async with scene() as (_, rest, members):
        await members[0].send(Heartbeat())
        every = (await rest.get(f"{JOB}/replicas"))["replicas"]
        assert [(one["replica_id"], one["state"], one["member"]) for one in every] == [
            ("r0:1", "training", True),
            ("r1:1", "training", True),
        ]
        for spelled in ("r1", "r1:1", "r1%3A1"):
            one = await rest.get(f"{JOB}/replicas/{spelled}")
            assert (one["replica_id"], one["address"]) == ("r1:1", "http://r1:1")


@pytest.mark.parametrize("path", ["", "/quorum", "/replicas", "/events", "/replicas/r0"])
async def test_an_unknown_job_is_a_problem_that_names_those_there_are(path: str) -> None:
    async with scene(1) as (_, rest, _members):
        problem = await rest.get(f"/v1/jobs/elsewhere{path}", 404)
        assert problem["detail"] == "there is no job 'elsewhere'; there are job"
        assert problem["known"] == ["job"]


async def test_an_unknown_replica_is_a_problem_that_names_those_there_are() -> None:
    async with scene() as (_, rest, _members):
        problems = [
            await rest.get(f"{JOB}/replicas/r9", 404),
            await rest.post(f"{JOB}/replicas/r9/evict", {"reason": "x"}, 404),
            await rest.post(f"{JOB}/replicas/r9/drain", {"reason": "x"}, 404),
        ]
        for problem in problems:
            assert "there are r0:1, r1:1" in problem["detail"]


async def test_a_lighthouse_without_jobs_answers() -> None:
    async with scene(0) as (_, rest, _members):
        assert await rest.get("/v1/jobs") == {"jobs": []}
        assert (await rest.get(JOB, 404))["detail"] == "there is no job 'job'; there is none"


# ---- orders


async def test_evict_ends_the_group_tells_the_others_and_is_in_the_event_log() -> None:
    async with scene() as (_, rest, members):
        event = await rest.post(f"{JOB}/replicas/r1/evict", {"reason": "bad GPU"})
        assert (event["kind"], event["replica_id"]) == ("evicted", "r1")
        facts = {"incarnations": ["r1:1"], "quorum_id": 1}
        assert event["detail"] == {"reason": "bad GPU", "by": "admin at 127.0.0.1", "ban_seconds": 0.0, **facts}
        assert await members[1].next(Evicted) == Evicted("bad GPU", 0.0)
        await members[1].ended()
        assert "evicted by admin" in (await members[0].next(MemberLost)).reason
        assert event in (await rest.get(f"{JOB}/events"))["events"]
        assert (await rest.get(f"{JOB}/replicas/r1"))["state"] == "gone"
        assert await rest.post(f"{JOB}/replicas/r1/evict", {"reason": "again"}) == event


async def test_a_ban_keeps_the_name_out_until_it_is_readmitted() -> None:
    async with scene() as (one, rest, _members):
        await rest.post(f"{JOB}/replicas/r1/evict", {"reason": "bad host", "ban_seconds": 500})
        await rest.post(f"{JOB}/replicas/never-seen/evict", {"reason": "bad host", "ban_seconds": 500})
        assert [ban["target"] for ban in (await rest.get(JOB))["bans"]] == ["r1", "never-seen"]
        async with connection(one.address, "r1:2") as banned:
            await banned.hello()
            assert (await banned.refusal()).code == "banned"
        event = await rest.post(f"{JOB}/replicas/r1/readmit")
        assert (event["kind"], event["detail"]) == ("readmitted", {"by": "admin at 127.0.0.1", "quorum_id": 1})
        assert await rest.post(f"{JOB}/replicas/r1/readmit", {}) == event
        async with connection(one.address, "r1:2") as welcome:
            await welcome.hello()
            await eventually(lambda: len(one.sessions) == 2)


async def test_drain_asks_the_group_to_leave_and_once_is_enough() -> None:
    async with scene() as (_, rest, members):
        event = await rest.post(f"{JOB}/replicas/r0/drain", {"reason": "maintenance"})
        assert (event["kind"], event["replica_id"]) == ("drain", "r0:1")
        assert await members[0].next(Drain) == Drain("maintenance")
        assert (await rest.get(f"{JOB}/replicas/r0"))["draining"] is True
        assert await rest.post(f"{JOB}/replicas/r0%3A1/drain", {"reason": "again"}) == event


async def test_a_policy_is_changed_at_once_and_twice_is_once() -> None:
    async with scene(2, policy=Policy(min_replicas=2, reconnect_grace=DEADLINE)) as (_, rest, members):
        before = (await rest.get(JOB))["policy"]
        unchanged = {"job": "job", "policy": before, "event": None}
        assert await rest.patch(JOB, {"min_replicas": 2}) == unchanged, "it was so from the beginning"
        members[1].cut()
        await members[0].ask(1, commit_failures=1)
        changed = await rest.patch(JOB, {"min_replicas": 1, "join_timeout": 0.0, "takeover_grace": 3})
        answer = await members[0].until(QuorumAnswer)
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
        assert await rest.patch(JOB, {"min_replicas": 1}) == changed
        assert [one for one in (await rest.get(f"{JOB}/events"))["events"] if one["kind"] == "policy"] == [event]
        again = await rest.patch(JOB, {"takeover_grace": None})
        assert again["policy"]["takeover_grace"] is None
        assert again["event"]["id"] > event["id"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "nothing to change is given; there are min_replicas, max_replicas, join_timeout"),
        (b'{"min_replica": 1}', "unknown field 'min_replica'; there are"),
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
        assert "gone already" in problem["detail"]
        problem = await rest.post(f"{JOB}/replicas/r0/readmit", {}, 409)
        assert problem["detail"] == "nothing stands against r0"


@pytest.mark.parametrize(
    ("order", "body", "said"),
    [
        ("evict", b"{", "the body is not JSON"),
        ("evict", b"\xff\xfe", "the body is not JSON"),
        ("evict", b"[" * 100_000, "the body is not JSON"),
        ("evict", b"[]", "must be a JSON object"),
        ("evict", b"", "a field is missing; there are ban_seconds, reason"),
        ("evict", b'{"reason": 5}', "reason must be text, not 5"),
        ("evict", b'{"reason": null}', "reason must be text"),
        ("evict", b'{"reason": "x", "ban_seconds": "1"}', "ban_seconds must be a number"),
        ("evict", b'{"reason": "x", "ban_seconds": true}', "ban_seconds must be a number"),
        ("evict", b'{"reason": "x", "ban_seconds": -1}', "ban_seconds must be between"),
        ("evict", b'{"reason": "x", "ban_seconds": NaN}', "ban_seconds must be between"),
        ("evict", b'{"reason": "x", "ban_seconds": 1e300}', "ban_seconds must be between"),
        ("evict", b'{"reason": "x", "for": 1}', "unknown field 'for'"),
        ("drain", b'{"ban_seconds": 1, "reason": "x"}', "unknown field 'ban_seconds'; there are reason"),
        ("drain", json.dumps({"reason": "x" * 1001}).encode(), "at most 1000"),
        ("readmit", b'{"reason": "x"}', "unknown field 'reason'; there is none"),
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


# ---- events


async def test_events_are_paged_and_their_numbers_grow() -> None:
    async with scene(3) as (_, rest, _members):
        every = (await rest.get(f"{JOB}/events"))["events"]
        assert [one["kind"] for one in every] == ["joined", "joined", "joined", "quorum"]
        assert [one["id"] - (1 << 32) for one in every] == [1, 2, 3, 4]
        page = await rest.get(f"{JOB}/events?after={every[0]['id']}&limit=2")
        assert page == {"job": "job", "events": every[1:3], "after": every[2]["id"]}
        assert (await rest.get(f"{JOB}/events?after={every[3]['id']}"))["events"] == []


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=1.5", "after=" + "9" * 30, "follow=yes", "limit=%00"])
async def test_a_query_that_will_not_do_is_a_problem(query: str) -> None:
    async with scene(1) as (_, rest, _members):
        problem = await rest.get(f"{JOB}/events?{query}", 400)
        assert query.partition("=")[0] in problem["detail"]


async def next_event(stream: aiohttp.ClientResponse) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE):
        async for line in stream.content:
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
    raise AssertionError("the stream ended")


async def test_a_follower_gets_what_there_is_then_what_happens() -> None:
    async with scene() as (one, rest, _members):
        async with rest.http.get(f"{rest.address}{JOB}/events?follow=1") as stream:
            assert stream.content_type == "text/event-stream"
            assert [(await next_event(stream))["kind"] for _ in range(3)] == ["joined", "joined", "quorum"]
            await rest.post(f"{JOB}/replicas/r0/drain", {"reason": "x"})
            drained = await next_event(stream)
            assert drained["kind"] == "drain"
        async with rest.http.get(
            f"{rest.address}{JOB}/events?follow=1", headers={"Last-Event-ID": str(drained["id"] - 1)}
        ) as again:
            assert await next_event(again) == drained
            ending = asyncio.create_task(again.read())
            await one.stop()
            async with asyncio.timeout(DEADLINE):
                await ending


async def test_followers_are_limited_and_one_that_goes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_FOLLOWERS", 1)
    monkeypatch.setattr(admin, "SIGN_OF_LIFE_SECONDS", 0.05)
    async with scene(1) as (_, rest, _members):
        first = await rest.http.get(f"{rest.address}{JOB}/events?follow=1")
        problem = await rest.get(f"{JOB}/events?follow=1", 503)
        assert problem["status"] == 503
        first.close()
        async with asyncio.timeout(DEADLINE):
            while True:
                second = await rest.http.get(f"{rest.address}{JOB}/events?follow=1")
                if second.status == 200:
                    break
                second.close()
                await asyncio.sleep(0.05)
        async with asyncio.timeout(DEADLINE):
            while b"nothing new" not in await second.content.readline():
                pass
        second.close()


async def test_a_follower_that_does_not_read_is_cut_off_and_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "SLOW_FOLLOWER_SECONDS", 0.2)
    async with scene(1) as (one, rest, members):
        host, port = rest.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /v1/jobs/job/events?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readline()
        detail = {"filler": "x" * 100_000}
        for _ in range(300):
            one.events.add("job", "filler", "", detail, 0.0)
        await round_of(members, 1)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(DEADLINE):
                await asyncio.sleep(1.0)
                while await reader.read(1 << 16):
                    pass
                raise ConnectionResetError("ended early")
        writer.close()
        assert (await rest.get("/healthz"))["status"] == "ok"


# ---- who may


ACCESS = {
    ("GET", "/healthz"): "anybody",
    ("GET", "/readyz"): "anybody",
    ("GET", "/openapi.json"): "anybody",
    ("GET", "/metrics"): "worker service admin",
    ("GET", "/v1/cluster"): "worker service admin",
    ("PUT", "/v1/services/{kind}/{name}"): "service admin",
    ("DELETE", "/v1/services/{kind}/{name}"): "service admin",
    ("GET", "/v1/jobs"): "worker service admin",
    ("GET", "/v1/jobs/{job}"): "worker service admin",
    ("PATCH", "/v1/jobs/{job}"): "admin",
    ("GET", "/v1/jobs/{job}/quorum"): "worker service admin",
    ("GET", "/v1/jobs/{job}/replicas"): "worker service admin",
    ("GET", "/v1/jobs/{job}/replicas/{replica_id}"): "worker service admin",
    ("GET", "/v1/jobs/{job}/events"): "worker service admin",
    ("GET", "/v1/jobs/{job}/session"): "worker admin",
    ("GET", "/v1/lighthouses/session"): "service admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/evict"): "admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/drain"): "admin",
    ("POST", "/v1/jobs/{job}/replicas/{replica_id}/readmit"): "admin",
}
TOKENS = Tokens(worker="worker-" * 3, service="service-" * 3, admin="admin-" * 4)


def test_the_table_has_every_route() -> None:
    routes = [(one.method, one.path) for one in all_routes(Lighthouse(LighthouseSettings()).service())]
    assert sorted(routes) == sorted(ACCESS)


@pytest.mark.parametrize("asker", ["nobody", "stranger", *(role.value for role in Role)])
async def test_each_route_lets_in_whom_the_table_says_and_nobody_else(asker: str) -> None:
    token = {"nobody": None, "stranger": "stranger-" * 3}.get(asker) or getattr(TOKENS, asker, None)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with lighthouse(tokens=TOKENS) as one, aiohttp.ClientSession(headers=headers) as http:
        for (method, path), roles in ACCESS.items():
            url = one.address + url_of(path)
            async with http.request(method, url) as response:
                allowed = roles == "anybody" or asker in roles.split()
                if allowed:
                    assert response.status not in (401, 403), (method, path, asker)
                else:
                    assert response.status == (403 if asker in {role.value for role in Role} else 401), (method, path)
                    assert (await response.json(content_type=None))["detail"]
        assert not one.jobs


async def test_a_session_needs_the_token_before_it_is_upgraded() -> None:
    async with lighthouse(tokens=TOKENS) as one:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connection(one.address, Authorization="Bearer wrong-wrong-wrong-wrong"):
                pass
        assert refused.value.status == 401
        async with connection(one.address, Authorization=f"Bearer {TOKENS.worker}") as fine:
            await fine.hello()
            await fine.message()


# ---- the description


ONE = "/v1/jobs/{job}/replicas/{replica_id}"
SERVICE = "/v1/services/{kind}/{name}"
BODIES: dict[tuple[str, str], Any] = {
    ("PUT", SERVICE): {"address": "http://a:1", "details": {"gib": 64, "full": None}},
    ("PATCH", "/v1/jobs/{job}"): {"min_replicas": 2},
    ("POST", f"{ONE}/evict"): {"reason": "x", "ban_seconds": 5},
    ("POST", f"{ONE}/drain"): {"reason": "x"},
    ("POST", f"{ONE}/readmit"): None,
    ("DELETE", SERVICE): None,
}
"""Of every order, in an order in which they can be carried out."""
SESSIONS = {("GET", "/v1/jobs/{job}/session"), ("GET", "/v1/lighthouses/session")}


def url_of(path: str, job: str = "job", replica_id: str = "r1") -> str:
    return path.format(job=job, replica_id=replica_id, kind="relay", name="relay-1")


async def test_the_description_is_openapi_and_has_what_the_router_has(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[web.Application] = []

    def kept(*arguments: Any, **how: Any) -> web.Application:
        served.append(application(*arguments, **how))
        return served[-1]

    monkeypatch.setattr(service, "application", kept)
    async with scene(0) as (_, rest, _members):
        document = await rest.get("/openapi.json")
    openapi_spec_validator.validate(document)
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    routed = {(route.method, route.resource.canonical) for route in served[0].router.routes() if route.resource}
    assert described == routed == set(ACCESS)
    for (method, path), roles in ACCESS.items():
        operation = document["paths"][path][method.lower()]
        named = [one["name"] for one in operation.get("parameters", []) if one["in"] == "path"]
        assert named == re.findall(r"\{(\w+)\}", path)
        if roles != "anybody" and path != "/metrics":
            assert operation["x-roles"] == sorted(roles.split())
        assert ("security" in operation) == (roles != "anybody")
        taken = BODIES.get((method, path))
        assert ("requestBody" in operation) == (taken is not None or path.endswith("/readmit"))
        if taken is not None:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            Draft202012Validator({**schema, "components": document["components"]}).validate(taken)


class Described:
    """Checks answers against the description. A field that it does not name is an error, bar those of a problem."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        for schema in document["components"]["schemas"].values():
            schema.setdefault("additionalProperties", False)

    def check(self, method: str, path: str, status: int, content_type: str, body: Any) -> None:
        responses = self._document["paths"][path][method.lower()]["responses"]
        assert status >= 400 or str(status) in responses, (method, path, status)
        content = responses.get(str(status), responses["default"]).get("content", {})
        if status >= 400 or "application/json" in content:
            schema = content[content_type]["schema"]
            Draft202012Validator({**schema, "components": self._document["components"]}).validate(body)


async def test_every_answer_is_as_described() -> None:
    async with scene(2) as (_, rest, members):
        described = Described(await rest.get("/openapi.json"))
        await members[0].ask(1)
        reads = [one for one in ACCESS if one[0] == "GET" and one not in SESSIONS]
        assert {*reads, *BODIES, *SESSIONS} == set(ACCESS)
        for method, path in (*reads, *BODIES, *reads):
            url = rest.address + url_of(path, replica_id="r0" if path.endswith("/drain") else "r1")
            async with rest.http.request(method, url, json=BODIES.get((method, path))) as answer:
                assert answer.status < 300, (method, path, await answer.text())
                body = await answer.json() if answer.content_type == "application/json" else None
                described.check(method, path, answer.status, answer.content_type, body)


@pytest.mark.parametrize(
    ("token", "job", "data", "statuses"),
    [
        (None, "job", None, {401}),
        (TOKENS.worker, "job", None, {400, 403, 404}),
        (TOKENS.admin, "elsewhere", b"{}", {400, 404}),
        (TOKENS.admin, "job", b"{", {400, 404}),
        (TOKENS.admin, "job", b" " * 2_000_000, {400, 404, 413}),
    ],
)
async def test_every_problem_is_as_described(
    token: str | None, job: str, data: bytes | None, statuses: set[int]
) -> None:
    async with lighthouse(tokens=TOKENS) as one, aiohttp.ClientSession() as http:
        async with http.get(f"{one.address}/openapi.json") as answer:
            described = Described(await answer.json())
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        met = set()
        for method, path in ACCESS:
            url = one.address + url_of(path, job)
            body = io.BytesIO(data) if data is not None and method != "GET" else None
            async with http.request(method, url, headers=headers, data=body) as answer:
                if answer.status >= 400:
                    assert answer.content_type == "application/problem+json", (method, path)
                    problem = await answer.json(content_type=None)
                    assert problem["status"] == answer.status
                    described.check(method, path, answer.status, answer.content_type, problem)
                    met.add(answer.status)
        assert met == statuses
