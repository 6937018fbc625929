"""`keepstep status`, `replicas`, `inspect`, `quorum`: what a lighthouse with real sessions is shown as."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest

from tests.services.cli.scene import keepstep, running
from tests.support.services.asking_group import Group
from tests.support.services.lighthouse_driver import eventually, worker


async def test_status_shows_the_lighthouse_and_its_jobs() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("status", *job.at)
        assert said.code == 0, said.err
        assert f"lighthouse {job.lighthouse.address}: leads, epoch 1" in said.out
        assert re.search(r"default +running +\d+ s +1 +- +- +2 +2", said.out)
        answer = json.loads((await keepstep("status", *job.at, "--json")).out)
        assert answer["epoch"] == 1
        assert [one["job"] for one in answer["jobs"]] == ["default"]


async def test_status_shows_the_services_and_the_store() -> None:
    async with running() as job, aiohttp.ClientSession() as http:
        body = {"address": "http://10.0.0.7:29520", "details": {"gib": 64}}
        async with http.put(f"{job.lighthouse.address}/v1/services/relay/relay-1", json=body) as answer:
            assert answer.status == 200
        said = await keepstep("status", *job.at)
        assert "store memory: works" in said.out
        assert "relay relay-1 http://10.0.0.7:29520  gib 64" in said.out
        (service,) = json.loads((await keepstep("status", "--json", *job.at)).out)["services"]
        assert (service["kind"], service["details"]) == ("relay", {"gib": 64})


async def test_status_of_an_idle_lighthouse_says_how_to_start_a_job_there() -> None:
    async with running() as job:
        said = (await keepstep("status", *job.at)).out
        assert f"keepstep run --lighthouse {job.lighthouse.address} --replicas 2" in said


async def test_status_of_one_job_is_that_of_no_other() -> None:
    async with running("r0") as job, Group(job.lighthouse.address, name="r0", job="night"):
        both = json.loads((await keepstep("status", "--json", *job.at, KEEPSTEP_JOB="night")).out)["jobs"]
        assert [one["job"] for one in both] == ["default", "night"]
        one = json.loads((await keepstep("status", "--json", *job.at, "--job", "night")).out)["jobs"]
        assert [one["job"] for one in one] == ["night"]
        assert (await keepstep("status", *job.at, "--job", "nope")).code == 4


UUID = "9a7c6573-1111-4222-8333-123456789abc"


async def test_an_incarnation_is_shown_and_taken_by_its_beginning() -> None:
    async with running("r0") as job, worker(job.lighthouse.address, f"r1:{UUID}", "default"):
        for command in ("replicas", "events", "quorum"):
            said = (await keepstep(command, *job.at)).out
            assert UUID not in said
        assert "r1:9a7c6573 " in (await keepstep("replicas", *job.at)).out
        assert UUID in (await keepstep("replicas", "--json", *job.at)).out
        assert f"r1:{UUID}" in (await keepstep("inspect", "r1:9a7c6573", *job.at)).out


async def test_replicas_shows_each_group_on_a_line_of_its_own() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("replicas", *job.at)
        assert said.code == 0, said.err
        assert re.search(r"r0:1 +training +1 ", said.out)
        assert re.search(r"r1:1 +training +1 ", said.out)
        answer = json.loads((await keepstep("replicas", *job.at, "--json")).out)
        assert [one["replica_id"] for one in answer["replicas"]] == ["r0:1", "r1:1"]


@pytest.mark.parametrize("name", ["r1", "r1:1"])
async def test_inspect_takes_a_name_or_an_incarnation(name: str) -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("inspect", name, *job.at)
        assert re.search(r"replica id +r1:1", said.out)
        assert re.search(r"address +http://10.0.0.1:1", said.out)
        assert json.loads((await keepstep("inspect", name, "--json", *job.at)).out)["name"] == "r1"


async def test_quorum_explains_why_the_next_one_is_not_there() -> None:
    async with running("r0", "r1") as job:
        asking = asyncio.create_task(job.groups[0].ask(2))
        await eventually(lambda: job.lighthouse.jobs["default"].core.quorum_view(0.0).asking == ("r0:1",))
        plain = await keepstep("quorum", *job.at)
        assert "job default: quorum 1 of epoch 1" in plain.out
        assert re.search(r"r0:1 +yes", plain.out)
        assert re.search(r"r1:1 +no", plain.out)
        assert "min_replicas" not in plain.out
        explained = await keepstep("quorum", *job.at, "--explain")
        assert re.search(r"^min_replicas: .*2", explained.out, re.MULTILINE), explained.out
        assert "gone:" not in explained.out
        await job.groups[1].session.failed("rank 1 died", 1.0)
        await eventually(lambda: bool(job.lighthouse.jobs["default"].core.quorum_view(0.0).gone))
        explained = await keepstep("quorum", *job.at, "--explain")
        assert "gone: r1:1: it failed: rank 1 died" in explained.out
        asking.cancel()
