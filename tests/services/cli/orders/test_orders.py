"""`keepstep drain`, `replace`, `evict`, `readmit`, `policy`: what an operator orders."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest
from aiohttp import web

from keepstep_mesh.protocol.messages import Drain, Evicted
from keepstep_mesh.security.tokens import Access, Tokens
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Service, serving
from tests.services.cli.scene import ADMIN, DEADLINE, WORKER, keepstep, running
from tests.support.services.command import environment
from tests.support.services.lighthouse_driver import worker


async def test_drain_asks_the_group_to_leave() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("drain", "r1", "--yes", "--reason", "new cable", *job.at)
        assert said.code == 0, said.err
        assert re.search(r"drain.*r1", said.out)
        push = await job.groups[1].push_of(Drain)
        assert isinstance(push, Drain)
        assert "new cable" in push.reason


async def test_one_order_names_several_groups_and_a_refusal_stops_none() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("drain", "r9", "r0", "r1", "--yes", "--json", *job.at)
        assert (said.code, "group 'r9' not found" in said.err) == (4, True), said.err
        assert [one["replica_id"] for one in json.loads(said.out)] == ["r0:1", "r1:1"]
        for group in job.groups:
            assert isinstance(await group.push_of(Drain), Drain)


async def test_replace_needs_a_spare_and_lets_it_in() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("replace", "r1", *job.at)
        assert said.code == 4
        assert "r1 cannot be replaced: no spare is ready; start spares (keepstep run --spares), or" in said.err
        async with worker(job.lighthouse.address, "r2:1", "default", standby=True, groups=2) as spare:
            await spare.ask()
            while "spare: r2:1" not in (said := await keepstep("quorum", "--explain", *job.at)).out:
                assert said.code == 0, said.err
            assert "r2:1 stands by as a spare: the job has 2 of 2 groups" in (await keepstep("replicas", *job.at)).out
            said = await keepstep("replace", "r1", "--reason", "bad fan", *job.at)
            assert said.out.startswith("a spare takes the place of r1:1, which then leaves\n")
            said = await keepstep("replace", "r1", *job.at)
            assert said.out.startswith("nothing to do: a spare replaces r1:1 already\n")
            explained = (await keepstep("quorum", "--explain", *job.at)).out
            assert "leaves when a spare has its place: r1:1\n" in explained
            assert "spare: " not in explained


async def test_evict_with_a_ban_keeps_a_name_out_until_it_is_readmitted() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("evict", "r1", "--yes", "--ban", "10m", "--reason", "sick", "--json", *job.at)
        assert said.code == 0, said.err
        assert json.loads(said.out)["kind"] == "evicted"
        assert (await keepstep("evict", "r7", "--ban", "1m", *job.at)).out.startswith(
            "no group r7 is connected; r7 is "
        )
        push = await job.groups[1].push_of(Evicted)
        assert isinstance(push, Evicted)
        assert push.ban_seconds > 0
        assert re.search(r"r1 until \d\d:\d\d:\d\d", (await keepstep("status", *job.at)).out)
        said = await keepstep("readmit", "r1", *job.at)
        assert said.code == 0, said.err
        assert said.out.startswith("r1, r1:1 may connect again\n")
        assert (await keepstep("readmit", "r1", *job.at)).out.startswith(
            "nothing to do: r1 is neither banned nor evicted\n"
        )
        bans = json.loads((await keepstep("status", "--json", *job.at)).out)["jobs"][0]["bans"]
        assert [ban["target"] for ban in bans] == ["r7"]


async def test_policy_shows_the_limits_of_a_job_and_changes_those_that_are_given() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("policy", *job.at)
        assert said.code == 0, said.err
        assert re.search(r"min replicas +2 ", said.out)
        assert re.search(r"takeover grace +the heartbeat timeout", said.out)
        flags = ("--min-replicas", "1", "--max-replicas", "4", "--join-timeout", "500ms", "--heal-timeout", "2m")
        flags += ("--heartbeat-timeout", "7", "--reconnect-grace", "1s", "--takeover-grace", "3")
        flags += ("--verify-every", "500", "--on-divergence", "report", "--drain-straggler-after", "200")
        flags += ("--job-ttl", "2h")
        changed = await keepstep("policy", "default", *flags, *job.at)
        assert changed.code == 0, changed.err
        assert re.search(r"join timeout +500 ms", changed.out)
        assert re.search(r"verify every +500 .*\n.*on divergence +report", changed.out)
        assert re.search(r"drain straggler after +200 ", changed.out)
        assert re.search(r"policy .*by=admin at 127.0.0.1 changed=", changed.out)
        again = await keepstep("policy", "--max-replicas", "4", *job.at)
        assert again.code == 0
        assert again.out.splitlines()[-1] == "nothing to do: already done"
        assert (await keepstep("policy", "default", "--job", "other", *job.at)).code == 2
        assert json.loads((await keepstep("policy", *job.at, "--json")).out) == {
            "min_replicas": 1,
            "max_replicas": 4,
            "join_timeout": 0.5,
            "heal_timeout": 120.0,
            "heartbeat_timeout": 7.0,
            "reconnect_grace": 1.0,
            "takeover_grace": 3.0,
            "initial_replicas": 0,
            "verify_every": 500,
            "on_divergence": "report",
            "drain_straggler_after": 200,
            "job_ttl": 7200.0,
            "refuse_going_back": False,
            "finish_grace": 30.0,
            "hang_after": None,
        }
        answer = json.loads((await keepstep("policy", "--takeover-grace", "none", "--json", *job.at)).out)
        assert answer["policy"]["takeover_grace"] is None
        assert answer["event"]["kind"] == "policy"
        refused = await keepstep("policy", "--min-replicas", "5", *job.at)
        assert refused.code == 4
        assert "max_replicas 4 is less than min_replicas 5" in refused.err
        assert (await keepstep("policy", "night", *job.at)).code == 4


async def test_orders_need_the_admin_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{ADMIN}\n")
    async with running("r0", tokens=Tokens(worker=WORKER, admin=ADMIN)) as job:
        for variables in ({}, {"KEEPSTEP_TOKEN": "wrong"}, {"KEEPSTEP_TOKEN": WORKER}):
            said = await keepstep("drain", "r0", "--yes", *job.at, **variables)
            assert said.code == 4, said
            assert "--token-file or KEEPSTEP_TOKEN" in said.err
        assert (await keepstep("replicas", *job.at, KEEPSTEP_TOKEN=WORKER)).code == 0
        assert (await keepstep("replicas", *job.at, KEEPSTEP_TOKEN_FILE=str(tmp_path / "token"))).code == 0
        flag = await keepstep(
            "drain", "r0", "--yes", *job.at, "--token-file", str(tmp_path / "token"), KEEPSTEP_TOKEN="wrong"
        )
        assert flag.code == 0, flag.err


async def test_an_order_follows_to_the_lighthouse_that_leads_and_takes_its_token_along() -> None:
    tokens = Tokens(worker=WORKER, admin=ADMIN)
    async with running("r0", tokens=tokens) as job:
        places = [job.lighthouse.address]

        async def elsewhere(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{places[-1]}{request.path}"})

        route = Route("POST", "/v1/{all:.*}", elsewhere, Access.ADMIN)
        async with serving(Service("follower", [route]), "127.0.0.1", 0, tokens=tokens) as follower:
            said = await keepstep("drain", "r0", "--yes", "--lighthouse", follower.url, KEEPSTEP_TOKEN=ADMIN)
            assert said.code == 0, said.err
            places.append(follower.url)
            said = await keepstep("drain", "r0", "--yes", "--lighthouse", follower.url, KEEPSTEP_TOKEN=ADMIN)
            assert said.code == 3
            assert f"{follower.url}: does not lead; {follower.url} does" in said.err


async def on_a_terminal(answer: str, *arguments: str) -> tuple[int, str]:
    """Run a command on a terminal, and type ``answer`` once it asks. Return its exit code and all that is shown."""
    ours, theirs = os.openpty()
    command = (sys.executable, "-m", "keepstep_cli", *arguments)
    started = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment()
    )
    os.close(theirs)
    shown = b""
    try:
        async with asyncio.timeout(DEADLINE):
            while b"[y/N]" not in shown:
                shown += await asyncio.to_thread(os.read, ours, 10_000)
            os.write(ours, f"{answer}\n".encode())
            code = await started.wait()
        return code, shown.decode()
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
        os.close(ours)


@pytest.mark.parametrize("order", ["drain", "evict"])
async def test_an_order_after_which_the_job_would_stop_is_given_only_if_it_is_meant(order: str) -> None:
    stops = "the job stops: 1 of its 2 groups would be left, and min_replicas is 2"
    async with running("r0", "r1") as job:
        said = await keepstep(order, "r1", *job.at)
        assert (said.code, said.err) == (4, f"Error: {stops}; if that is meant, add --yes\n")
        code, shown = await on_a_terminal("n", order, "r1", *job.at)
        assert (code, stops[1:] in shown) == (1, True), shown
        kinds = {one["kind"] for one in json.loads((await keepstep("events", "--json", *job.at)).out)["events"]}
        assert not kinds & {"drain", "evicted"}
        code, shown = await on_a_terminal("y", order, "r1", *job.at)
        assert code == 0, shown
        assert isinstance(await job.groups[1].push_of(Drain if order == "drain" else Evicted), Drain | Evicted)


async def test_an_order_that_leaves_enough_groups_is_given_at_once() -> None:
    async with running("r0", "r1", "r2") as job:
        assert (await keepstep("policy", "--min-replicas", "2", *job.at)).code == 0
        assert (await keepstep("drain", "r1", *job.at)).code == 0
        said = await keepstep("drain", "r2", *job.at)
        assert said.code == 4, "the group that is draining does not count"
        assert "1 of its 2 groups would be left" in said.err
