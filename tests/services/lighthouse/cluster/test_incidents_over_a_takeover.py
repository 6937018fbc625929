"""Incidents when the leading lighthouse ends and another one, which lives, takes over."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any

import aiohttp

from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.incidents.listing import KIND
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.asking_group import Group
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import DEADLINE, eventually, lighthouse


def incidents(at: Lighthouse) -> dict[str, str]:
    """Return the verdicts in the memory of one lighthouse, by group."""
    return {one.replica_id: str(one.detail["verdict"]) for one in at.events.newest("job", 1000) if one.kind == KIND}


async def report(http: aiohttp.ClientSession, at: Lighthouse, **facts: Any) -> None:
    """Report an end as a launcher does: again, until the lighthouse accepts it."""
    async with asyncio.timeout(DEADLINE):
        while True:
            async with http.post(f"{at.address}/v1/jobs/job/incidents", json={"rank": 0, **facts}) as answer:
                if answer.status == HTTPStatus.NO_CONTENT:
                    return
            await asyncio.sleep(0.1)  # until the job is known there


async def test_incidents_outlive_their_leader_and_the_next_one_decides_each_end_once(etcd: EtcdCluster) -> None:
    settings = {"store": f"{etcd.address}/{uuid.uuid4()}", "lease": 3.0}
    policy = Policy(min_replicas=1, takeover_grace=1.0, reconnect_grace=0.5, hang_after=0.0)
    async with AsyncExitStack() as first, aiohttp.ClientSession() as http:
        leader = await first.enter_async_context(lighthouse(policy=policy, **settings))
        async with lighthouse(**settings) as follower:
            await eventually(lambda: len(leader.followers) == 1)
            async with (
                Group(leader.address, follower.address, name="r0") as r0,
                Group(leader.address, name="r1") as r1,
            ):
                await asyncio.gather(r0.ask(), r1.ask())
                await report(http, leader, replica_id="r9", code=7, host="node-9", log="the last line")
                await eventually(lambda: "r9" in incidents(follower))
                before = incidents(leader)
                await first.aclose()
            # r1 died with the leader, and its launcher finds the next one
            async with Group(follower.address, name="r0", incarnation=2) as r0:
                await report(http, follower, replica_id="r1:1", code=-9, oom_kills=1, host="node-1")
                await eventually(lambda: incidents(follower).get("r1:1") == "out of memory")
                await r0.ask()
                async with http.get(f"{follower.address}/v1/jobs/job/incidents") as answer:
                    told = (await answer.json())["incidents"]
                assert [one["replica_id"] for one in told if one["replica_id"] != "r0:1"] == ["r1:1", "r9"]
                assert {one["replica_id"]: one["verdict"] for one in told}["r9"] == before["r9"] == "script"
