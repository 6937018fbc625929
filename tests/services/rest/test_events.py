"""The events of a job: pages of them, and a stream to follow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest

from keepstep_lighthouse.api import event_stream
from keepstep_mesh.serving import server_sent_events
from tests.services.rest.scene import JOB, Rest, scene
from tests.support.services.lighthouse_driver import DEADLINE, round_of


async def test_events_are_paged_and_their_numbers_grow() -> None:
    async with scene(3) as (_, rest, _members):
        every = (await rest.get(f"{JOB}/events"))["events"]
        assert [one["kind"] for one in every] == ["joined", "joined", "joined", "quorum"]
        assert [one["id"] - (1 << 32) for one in every] == [1, 2, 3, 4]
        page = await rest.get(f"{JOB}/events?after={every[0]['id']}&limit=2")
        assert page == {"job": "job", "events": every[1:3], "after": every[2]["id"]}
        assert (await rest.get(f"{JOB}/events?after={every[3]['id']}"))["events"] == []
        assert (await rest.get(f"{JOB}/events?after=0&limit=2"))["events"] == every[:2]
        assert (await rest.get(f"{JOB}/events?limit=2"))["events"] == every[2:], "the newest"
        assert (await rest.get(f"{JOB}/events?limit=0"))["events"] == []


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=1.5", "after=" + "9" * 30, "follow=yes", "limit=%00"])
async def test_a_query_that_will_not_do_is_a_problem(query: str) -> None:
    async with scene(1) as (_, rest, _members):
        problem = await rest.get(f"{JOB}/events?{query}", 400)
        assert query.partition("=")[0] in problem["detail"]


async def test_a_number_that_no_event_can_have_is_passed_over() -> None:
    async with scene(1) as (_, rest, _members):
        headers = {"Last-Event-ID": "9" * 5000}
        async with rest.http.get(f"{rest.address}{JOB}/events?follow=1", headers=headers) as stream:
            assert (await next_event(stream))["kind"] == "joined"


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


async def follower_when_there_is_room(rest: Rest) -> aiohttp.ClientResponse:
    async with asyncio.timeout(DEADLINE):
        while (answer := await rest.http.get(f"{rest.address}{JOB}/events?follow=1")).status != 200:
            answer.close()
            await asyncio.sleep(0.05)  # no message tells
    return answer


async def test_followers_are_limited_and_one_that_goes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_FOLLOWERS", 1)
    monkeypatch.setattr(event_stream, "KEEPALIVE_SECONDS", 0.05)
    async with scene(1) as (_, rest, _members):
        first = await rest.http.get(f"{rest.address}{JOB}/events?follow=1")
        problem = await rest.get(f"{JOB}/events?follow=1", 503)
        assert problem["status"] == 503
        first.close()
        second = await follower_when_there_is_room(rest)
        async with asyncio.timeout(DEADLINE):
            while b"nothing new" not in await second.content.readline():
                pass
        second.close()


async def test_a_follower_that_does_not_read_is_cut_off_and_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_FOLLOWERS", 1)
    monkeypatch.setattr(server_sent_events, "SLOW_STREAM_SECONDS", 0.2)
    async with scene(1) as (one, rest, members):
        host, port = rest.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /v1/jobs/job/events?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        detail = {"filler": "x" * 100_000}
        for _ in range(300):
            one.events.add("job", "filler", "", detail, 0.0)
        await round_of(members, 1)
        (await follower_when_there_is_room(rest)).close()
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass
        writer.close()
        assert (await rest.get("/healthz"))["status"] == "ok"
