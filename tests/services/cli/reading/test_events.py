"""`keepstep events`: what happened, and what happens."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from aiohttp import web

from keepstep_cli.asking import rest
from keepstep_cli.errors import Unreachable
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Service, serving
from tests.services.cli.scene import DEADLINE, keepstep, line_of, running
from tests.support.network.ports import free_port
from tests.support.services.asking_group import Group
from tests.support.services.command import process
from tests.support.services.lighthouse_driver import lighthouse


async def test_events_shows_what_happened_and_takes_after_and_limit() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("events", *job.at)
        assert re.search(r"joined +r0:1", said.out)
        assert re.search(r"quorum +quorum_id=1", said.out)
        events = json.loads((await keepstep("events", *job.at, "--json")).out)["events"]
        assert len(events) == len(said.out.splitlines())
        newest = json.loads((await keepstep("events", *job.at, "--json", "--limit", "1")).out)["events"]
        assert newest == events[-1:]
        oldest = json.loads((await keepstep("events", *job.at, "--json", "--limit", "1", "--after", "0")).out)["events"]
        assert oldest == events[:1]
        rest = await keepstep("events", *job.at, "--json", "--after", str(events[0]["id"]))
        assert json.loads(rest.out)["events"] == events[1:]


@pytest.mark.parametrize(
    ("command", "flag"), [("events", ""), ("events", "--json"), ("replicas", ""), ("replicas", "--json")]
)
async def test_the_reason_of_a_worker_cannot_command_the_terminal_of_an_operator(command: str, flag: str) -> None:
    async with running("r0", "r1") as job:
        await job.groups[1].session.leave("bad disk\x1b[2J\n\x9b31m\u202e", DEADLINE)
        drained = await keepstep("drain", "r0", "--yes", *job.at, "--reason", "bad fan\x1b[2J\nall is well")
        said = await keepstep(command, *job.at, *([flag] if flag else []))
        assert "bad disk" in said.out
        assert all(line.isprintable() for line in (*said.out.splitlines(), *drained.out.splitlines()))
        assert not any(line.startswith("all is well") for line in said.out.splitlines())


@pytest.mark.parametrize("flag", ["--follow", "-f"])
async def test_events_follow_goes_on_with_each_event(flag: str) -> None:
    async with running("r0") as job, process("events", flag, "--json", *job.at) as follower:
        assert follower.stdout is not None
        async with asyncio.timeout(DEADLINE):
            while json.loads(await follower.stdout.readline())["kind"] != "quorum":
                pass
            await job.groups[0].session.leave("the test is over", DEADLINE)
            assert json.loads(await follower.stdout.readline())["replica_id"] == "r0:1"


async def test_events_follow_waits_for_a_job_and_goes_on_at_the_next_lighthouse_that_answers(tmp_path: Path) -> None:
    store, port = f"sqlite://{tmp_path / 'store'}", free_port()
    async with lighthouse(store=store) as first:
        addresses = f"{first.address},http://127.0.0.1:{port}"
        async with process("events", "--follow", "--json", "--lighthouse", addresses) as follower:
            assert "job 'default' not found" in await line_of(follower.stderr, "waiting for it")
            async with Group(first.address, name="r1", job="default"):
                assert json.loads(await line_of(follower.stdout, "joined"))["replica_id"] == "r1:1"
            await first.stop()
            assert re.search(r"asking for (those|the events) after \d+$", await line_of(follower.stderr, "asking for"))
            async with (
                lighthouse(store=store, bind=f"127.0.0.1:{port}") as second,
                Group(second.address, name="r3", job="default"),
            ):
                assert json.loads(await line_of(follower.stdout, "r3"))["kind"] == "joined"


async def test_a_follower_gives_up_when_no_lighthouse_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "FOLLOW_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(rest, "ASK_AGAIN_SECONDS", 0.05)
    async with running("r0") as job:
        told: list[str] = []
        following = rest.Lighthouse(job.lighthouse.address, None)
        events = following.follow("jobs", "default", "events", after=0, told=told.append, follow=1)
        assert (await anext(events))["kind"] == "joined"
        await job.lighthouse.stop()
        with pytest.raises(Unreachable, match="no lighthouse answers"):
            async with asyncio.timeout(DEADLINE):
                async for _ in events:
                    pass
        assert len(told) == 1


async def test_a_follower_that_was_answered_again_has_all_its_patience_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "FOLLOW_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(rest, "ASK_AGAIN_SECONDS", 0.05)
    answered = 0

    async def one_event_or_none(request: web.Request) -> web.StreamResponse:
        """Of three answers the second has no event for longer than that. Each of them breaks off."""
        nonlocal answered
        answered += 1
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if answered == 2:
            await asyncio.sleep(2 * rest.FOLLOW_PATIENCE_SECONDS)
        else:
            await answer.write(f'data: {{"id": {answered}}}\n\n'.encode())
        assert request.transport is not None
        request.transport.abort()
        return answer

    route = Route("GET", "/v1/jobs/default/events", one_event_or_none, Access.READ)
    async with serving(Service("lighthouse", [route]), "127.0.0.1", 0) as silent:
        events = rest.Lighthouse(silent.url, None).follow("jobs", "default", "events", after=0, told=lambda _: None)
        async with asyncio.timeout(DEADLINE):
            assert [(await anext(events))["id"] for _ in range(2)] == [1, 3]
        await events.aclose()
