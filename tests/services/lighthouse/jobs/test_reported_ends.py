"""Reports of launchers over REST, and what an operator reads of them."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep.session.session_machine import About
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tokens import Tokens
from tests.services.cli.scene import keepstep
from tests.support.services.asking_group import Group
from tests.support.services.lighthouse_driver import eventually, lighthouse

WORKER, ADMIN = "w" * 20, "a" * 20
OUT_OF_MEMORY = {"replica_id": "r1:1", "rank": 2, "code": -9, "oom_kills": 1, "memory": "/sys/fs/cgroup/memory.events"}


async def ask(address: str, method: str, path: str, token: str = "", **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    how = {"json": body} if body else {}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.request(method, f"{address}/v1/jobs/job{path}", **how) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if text else None


async def test_the_end_of_a_group_is_told_once_its_launcher_and_the_lighthouse_agree() -> None:
    about = About("node-1", "", 0)
    async with (
        lighthouse(policy=Policy(min_replicas=1, reconnect_grace=0.1)) as one,
        Group(one.address, name="r0"),
        Group(one.address, name="r1", about=about) as r1,
    ):
        status, _ = await ask(one.address, "POST", "/incidents", **OUT_OF_MEMORY, log="step 1\nstep 2\x1b[2J")
        assert status == HTTPStatus.NO_CONTENT
        assert (await ask(one.address, "GET", "/incidents"))[1]["incidents"] == [], "it is still connected"
        await r1.session.close()
        await eventually(lambda: one.jobs["job"].newest_incident is not None)
        _, told = await ask(one.address, "GET", "/incidents")
        [incident] = told["incidents"]
        assert (incident["verdict"], incident["host"], incident["exit"], incident["rank"]) == (
            "out of memory",
            "node-1",
            "was killed by SIGKILL",
            2,
        )
        assert incident["evidence"][0] == "rank 2 was killed by SIGKILL"
        async with aiohttp.ClientSession() as http, http.get(f"{one.address}/metrics") as answer:
            series = (await answer.text()).splitlines()
        assert 'keepstep_incidents_total{job="job",verdict="out of memory"} 1.0' in series
        assert 'keepstep_incidents_total{job="job",verdict="machine"} 0.0' in series
        assert "log" not in incident
        _, whole = await ask(one.address, "GET", f"/incidents/{incident['id']}")
        assert whole["log"] == ["step 1", "step 2\x1b[2J"]
        _, about_job = await ask(one.address, "GET", "")
        assert about_job["incident"]["id"] == incident["id"]
        at = ("--lighthouse", one.address, "--job", "job")
        listed = await keepstep("incidents", *at)
        assert "out of memory" in listed.out
        assert "rank 2 was killed by SIGKILL; the kernel killed a process because memory ran out" in listed.out
        shown = await keepstep("incidents", str(incident["id"]), *at)
        assert "step 1" in shown.out
        assert "\x1b" not in shown.out
        assert "r1:1 ended" in (await keepstep("status", *at)).out


async def test_a_machine_that_fails_repeatedly_is_named(tmp_path: Path) -> None:
    async with lighthouse() as one, Group(one.address, name="r0"):
        for ago in (30.0, 20.0):
            report = {"replica_id": "r9", "rank": 0, "code": 85, "host": "bad-node", "seconds_ago": ago}
            assert (await ask(one.address, "POST", "/incidents", **report))[0] == HTTPStatus.NO_CONTENT
        _, told = await ask(one.address, "GET", "/incidents")
        assert told["hosts"] == [{"host": "bad-node", "failures": 2, "verdicts": {"machine": 2}}]
        assert told["incidents"][0]["time"] > told["incidents"][1]["time"]
        listed = await keepstep("incidents", "--lighthouse", one.address, "--job", "job")
        assert "bad-node fails repeatedly: 2 times (2 machine)" in listed.out


async def test_incidents_outlive_the_lighthouse_but_their_output_does_not(tmp_path: Path) -> None:
    kept = {"store": f"sqlite://{tmp_path}/store", "event_log": tmp_path / "events.jsonl"}
    policy = Policy(min_replicas=1)
    async with lighthouse(policy=policy, **kept) as first, Group(first.address, name="r0") as r0:
        await r0.ask()
        await ask(first.address, "POST", "/incidents", **{**OUT_OF_MEMORY, "log": "step 1"})
        [before] = (await ask(first.address, "GET", "/incidents"))[1]["incidents"]
    async with lighthouse(policy=policy, **kept) as second:
        [after] = (await ask(second.address, "GET", "/incidents"))[1]["incidents"]
        assert after == before
        assert (await ask(second.address, "GET", ""))[1]["incident"] == before
        assert (await ask(second.address, "GET", f"/incidents/{before['id']}"))[1]["log"] == []


async def test_only_an_administrator_reads_the_output_of_a_group() -> None:
    tokens = Tokens(worker=WORKER, admin=ADMIN)
    async with lighthouse(tokens=tokens) as one, Group(one.address, name="r0", token=WORKER):
        report = {**OUT_OF_MEMORY, "log": "the password is hunter2"}
        assert (await ask(one.address, "POST", "/incidents", WORKER, **report))[0] == HTTPStatus.NO_CONTENT
        status, told = await ask(one.address, "GET", "/incidents", WORKER)
        assert status == HTTPStatus.OK
        assert "hunter2" not in json.dumps([told, await ask(one.address, "GET", "/events", WORKER)])
        number = told["incidents"][0]["id"]
        assert (await ask(one.address, "GET", f"/incidents/{number}", WORKER))[0] == HTTPStatus.FORBIDDEN
        assert (await ask(one.address, "GET", f"/incidents/{number}", ADMIN))[1]["log"] == [report["log"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log": "x" * 16_001}, "log too long: more than 16000 characters"),
        ({"error": "x" * 1001}, "error too long"),
        ({"code": 10**10}, "code too long"),
        ({"replica_id": "a\nb:1"}, "replica_id: invalid name of a replica group"),
        ({"verdict": "machine"}, "unknown field 'verdict'"),
        ({"code": "killed"}, "code must be a whole number"),
    ],
)
async def test_a_report_that_is_invalid_is_refused(change: dict[str, Any], words: str) -> None:
    async with lighthouse() as one, Group(one.address, name="r0"):
        status, told = await ask(one.address, "POST", "/incidents", **{**OUT_OF_MEMORY, **change})
        assert status == HTTPStatus.BAD_REQUEST
        assert words in told["detail"]
        assert one.jobs["job"].newest_incident is None


async def test_an_incident_that_is_not_known_is_not_found() -> None:
    async with lighthouse() as one, Group(one.address, name="r0"):
        assert (await ask(one.address, "GET", "/incidents/7"))[0] == HTTPStatus.NOT_FOUND
