"""Facts that a group sends with its hello: shown to operators, and used for the first quorum of the job."""

from __future__ import annotations

import asyncio

import aiohttp

from keepstep.session.session_machine import About
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.asking_group import Group
from tests.support.services.lighthouse_driver import eventually, lighthouse


async def test_restarts_host_and_versions_are_shown_and_a_difference_is_an_event() -> None:
    usual, other = About("node-1", "python 3.11", 0), About("node-2", "python 3.12", 0)
    async with (
        lighthouse(policy=Policy(min_replicas=1)) as one,
        Group(one.address, name="r0", about=usual),
        aiohttp.ClientSession() as http,
    ):
        async with Group(one.address, name="r1", about=usual) as first:
            await first.session.leave("a test", 30)
        async with Group(one.address, name="r1", about=other, incarnation=2):
            async with http.get(f"{one.address}/v1/jobs/job/replicas") as answer:
                told = {view["replica_id"]: view for view in (await answer.json())["replicas"]}
            async with http.get(f"{one.address}/v1/jobs/job/events") as answer:
                events = (await answer.json())["events"]
    shown = {name: [told[name][fact] for fact in ("host", "runtime", "restarts")] for name in ("r0:1", "r1:2")}
    assert shown == {"r0:1": ["node-1", "python 3.11", 0], "r1:2": ["node-2", "python 3.12", 1]}
    differs = [event for event in events if event["kind"] == "runtime_differs"]
    assert [event["replica_id"] for event in differs] == ["r1:2"]
    assert differs[0]["detail"] == {"runtime": "python 3.12", "others": "python 3.11"}


async def test_the_old_session_of_a_group_does_not_hide_that_its_new_one_differs() -> None:
    usual, other = About("node-1", "python 3.11", 0), About("node-2", "python 3.12", 0)
    async with (
        lighthouse(policy=Policy(min_replicas=1)) as one,
        Group(one.address, name="r1", about=usual),
        Group(one.address, name="r0", about=usual) as r0,
        Group(one.address, name="r1", about=other, incarnation=2),
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{one.address}/v1/jobs/job/events") as answer:
            events = (await answer.json())["events"]
        await r0.session.close()
        await eventually(lambda: set(one.jobs["job"]._connected) == {"r1"})
    assert [event["replica_id"] for event in events if event["kind"] == "runtime_differs"] == ["r1:2"]


async def test_the_first_quorum_waits_for_the_number_of_groups_that_a_group_tells() -> None:
    about = About(groups=2)
    async with (
        lighthouse(policy=Policy(min_replicas=1)) as one,
        Group(one.address, name="r0", about=about) as r0,
        aiohttp.ClientSession() as http,
    ):
        first = asyncio.create_task(r0.ask())
        while True:
            async with http.get(f"{one.address}/v1/jobs/job/quorum") as answer:
                if (reason := (await answer.json())["reason"])["code"] != "nobody":
                    break
        assert (reason["code"], reason["numbers"]["initial_replicas"]) == ("initial_replicas", 2)
        async with Group(one.address, name="r1", about=about) as r1:
            quorums = await asyncio.gather(first, r1.ask())
        assert [len(quorum.listed) for quorum in quorums] == [2, 2]
