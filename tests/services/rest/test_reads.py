"""Reads: health, metrics, the cluster, jobs, quorums, replicas."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from keepstep_mesh.protocol.messages import Exposure, Healing, Heartbeat, Leave, ShardReport
from tests.services.rest.scene import JOB, scene
from tests.support.services.lighthouse_driver import DEADLINE, eventually, round_of, worker


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


async def test_a_host_that_is_no_address_is_a_bad_request() -> None:
    async with scene() as (_, rest, _members), rest.http.get(f"{rest.address}/v1/cluster", headers={"Host": ""}) as it:
        assert it.status == 400
        assert "invalid Host header" in (await it.json())["detail"]


async def test_metrics_of_a_job_count_steps_waits_heals_and_events_under_stable_names() -> None:
    async with scene() as (_, rest, members):
        await members[0].send(told := Healing(100, 100, 50.0, 1, "r1:1", "direct", 2.0), replace(told, ended=True))
        await round_of(members, step=1)
        await round_of(members, step=2)
        await round_of(members, step=2, commit_failures=1)
        async with rest.http.get(f"{rest.address}/metrics") as response:
            text = await response.text()
        for line in (
            'keepstep_steps_total{job="job"} 2.0',
            'keepstep_quorum_wait_seconds_count{job="job"} 8.0',
            'keepstep_step_seconds_count{job="job"} 6.0',
            'keepstep_group_steps_total{job="job",outcome="committed"} 4.0',
            'keepstep_group_steps_total{job="job",outcome="discarded"} 2.0',
            'keepstep_healed_bytes_total{job="job"} 100.0',
            'keepstep_heal_seconds_bucket{job="job",le="1.0"} 0.0',
            'keepstep_heal_seconds_bucket{job="job",le="2.5"} 1.0',
            'keepstep_heal_seconds_sum{job="job"} 2.0',
            'keepstep_commit_gap_seconds_count{job="job"} 1.0',
            'keepstep_events_total{job="job",kind="healed"} 1.0',
            'keepstep_events_total{job="job",kind="joined"} 2.0',
            'keepstep_events_total{job="job",kind="replicas_differ"} 0.0',
            'keepstep_group_step{group="r0",job="job"} 2.0',
        ):
            assert line in text.splitlines(), line
        assert "r0:1" not in text
        assert re.search(
            r'^keepstep_build_info{python="3\.\d+\.\d+",service="lighthouse",version="\S+"} 1.0$', text, re.MULTILINE
        )
        assert re.search(r"^process_resident_memory_bytes [1-9]", text, re.MULTILINE)


async def test_shards_of_a_model_that_exists_once_are_shown_with_their_keepers_and_exposure() -> None:
    async with scene() as (_, rest, members):
        told = ShardReport(1, 0, 2, 4, "resized", 7, 0.5, 100, (members[1].replica_id,), formed=True)
        full = (Exposure(members[1].replica_id, "no memory"),)
        await members[0].send(replace(told, exposed=full))
        await members[1].send(replace(told, seat=1, keepers=(members[0].replica_id,)), Heartbeat())

        async def replica(number: int) -> dict[str, Any]:
            return await rest.get(f"{JOB}/replicas/{members[number].replica_id}")

        while (await replica(1))["shards"] is None:
            pass
        assert (await replica(0))["shards"] == {
            "world": 1,
            "seat": 0,
            "ranks": 2,
            "former_ranks": 4,
            "how": "resized",
            "step": 7,
            "seconds": 0.5,
            "copies_bytes": 100,
            "keepers": [members[1].replica_id],
            "went_back": 0,
            "formed": True,
            "exposed": [{"keeper": members[1].replica_id, "reason": "no memory"}],
            "keeps": [],
        }
        sentence = f"{members[0].replica_id} is exposed: its keeper {members[1].replica_id} has no copies: no memory"
        for view in (await rest.get(JOB), await rest.get(f"{JOB}/quorum")):
            assert (view["exposed"], view["copies_bytes"]) == ([sentence], 200)
        async with rest.http.get(f"{rest.address}/metrics") as response:
            lines = (await response.text()).splitlines()
        for line in (
            'keepstep_one_copy_members{job="job"} 2.0',
            'keepstep_one_copy_exposed{job="job"} 1.0',
            'keepstep_one_copy_copies_bytes{job="job"} 200.0',
            'keepstep_one_copy_recovery_seconds_sum{job="job"} 0.5',
            'keepstep_events_total{job="job",kind="world_formed"} 1.0',
            'keepstep_events_total{job="job",kind="shards_lost"} 0.0',
        ):
            assert line in lines, line
        assert "each group holds other shards" in (await rest.post(f"{JOB}/verify", status=409))["detail"]


async def test_a_group_that_comes_back_as_another_incarnation_is_in_the_metrics_once() -> None:
    async with scene() as (one, rest, members), worker(one.address, "r0:2"):
        members[0].cut()
        async with rest.http.get(f"{rest.address}/metrics") as response:
            lines = (await response.text()).splitlines()
        assert len([line for line in lines if line.startswith('keepstep_group_step{group="r0"')]) == 1


async def test_the_cluster_is_told_under_the_address_that_was_asked() -> None:
    async with scene() as (one, rest, _):
        rest.address = rest.address.replace("127.0.0.1", "localhost")
        cluster = await rest.get("/v1/cluster")
        assert cluster["store"].pop("read_seconds") >= 0
        assert cluster == {
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
        assert "r1:1 is connected but has not asked" in reason["sentence"]


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


async def test_of_an_incarnation_the_beginning_is_enough() -> None:
    async with scene(1) as (one, rest, _members), worker(one.address, "r1:0123456789ab"):
        assert (await rest.get(f"{JOB}/replicas/r1:01234567"))["replica_id"] == "r1:0123456789ab"
        await rest.get(f"{JOB}/replicas/r1:0123456", 404)
        answer = await rest.post(f"{JOB}/replicas/r1:01234567/evict", {"reason": "x"})
        assert answer["replica_id"] == "r1:0123456789ab"


async def test_a_group_that_came_back_again_and_again_is_shown_as_it_is_now() -> None:
    async with scene(1) as (one, rest, _members):
        for number in (1, 2):
            async with worker(one.address, f"r1:{number}") as gone:
                await gone.send(Leave("x"))
                await gone.ended()
        assert (await rest.get(f"{JOB}/replicas/r1"))["replica_id"] == "r1:2", "the last one"


@pytest.mark.parametrize("path", ["", "/quorum", "/replicas", "/events", "/replicas/r0"])
async def test_an_unknown_job_is_a_problem_that_names_those_there_are(path: str) -> None:
    async with scene(1) as (_, rest, _members):
        problem = await rest.get(f"/v1/jobs/elsewhere{path}", 404)
        assert problem["detail"].startswith(
            "job 'elsewhere' not found; known jobs: job; a job is created when its first group"
        )
        assert problem["detail"].endswith("keepstep run --job elsewhere")
        assert problem["known"] == ["job"]


async def test_an_unknown_replica_is_a_problem_that_names_those_there_are() -> None:
    async with scene() as (_, rest, _members):
        problems = [
            await rest.get(f"{JOB}/replicas/r9", 404),
            await rest.post(f"{JOB}/replicas/r9/evict", {"reason": "x"}, 404),
            await rest.post(f"{JOB}/replicas/r9/drain", {"reason": "x"}, 404),
        ]
        for problem in problems:
            assert "known groups: r0, r1" in problem["detail"]


async def test_a_lighthouse_without_jobs_answers() -> None:
    async with scene(0) as (_, rest, _members):
        assert await rest.get("/v1/jobs") == {"jobs": []}
        assert (await rest.get(JOB, 404))["detail"].startswith(
            "job 'job' not found; known jobs: none; a job is created when"
        )


async def test_a_job_is_running_and_then_finished_without_members() -> None:
    async with scene() as (_, rest, members):
        job = await rest.get(JOB)
        assert (job["state"]["code"], job["state"]["why"]) == ("running", "")
        for number, member in enumerate(members):
            await member.send(Leave("shutdown", "finished", 1))
            await member.ended()
            job, quorum = await rest.get(JOB), await rest.get(f"{JOB}/quorum")
            left = len(members) - number - 1
            assert (job["members"], job["healthy"], len(quorum["members"])) == (left, left, left)
        assert job["state"] | {"since": 0} == {"code": "finished", "step": 1, "since": 0, "why": ""}
        (listed,) = (await rest.get("/v1/jobs"))["jobs"]
        assert listed["state"] == job["state"]
        (end,) = [one for one in (await rest.get(f"{JOB}/events"))["events"] if one["kind"] == "job_finished"]
        assert end["detail"]["step"] == 1
