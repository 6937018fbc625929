"""Values of a killed lighthouse that the next process goes on with."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_settings import SessionSettings
from keepstep_chaos.histories.reading import check_files
from keepstep_mesh.protocol.messages import MemberLost, Quorum, Welcome
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.asking_group import quorum_request
from tests.support.services.lighthouse_driver import (
    DEADLINE,
    connection,
    eventually,
    lighthouse,
    round_of,
    worker,
    workers,
)


class Process:
    """A real lighthouse process on a port of its own, started again on the same one."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.directory = directory
        self.port = port
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "keepstep_cli", "lighthouse", "--bind", f"127.0.0.1:{self.port}"),
            *("--store", f"sqlite://{self.directory}/lighthouse.db", "--min-replicas", "2"),
            *("--event-log", str(self.directory / "events.jsonl")),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(DEADLINE):
            said = b""
            while not (found := re.search(rb"url.*127\.0\.0\.1:(\d+)", said)):
                said = await self.process.stderr.readline()
                assert said, "the lighthouse ended"
        self.port = int(found[1])

    async def end(self, number: int) -> int:
        os.kill(self.process.pid, number)
        await self.process.stderr.read()
        return await self.process.wait()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def test_sigkill_costs_the_workers_nothing_but_a_moment(tmp_path: Path) -> None:
    """Epoch and quorum_id grow, requests that were open are answered, the event log goes on with higher numbers."""
    server = Process(tmp_path)
    await server.start()
    clients = []
    for number in range(3):
        settings = SessionSettings((server.address,), "job", f"r{number}:1", connect_timeout=DEADLINE)
        clients.append(LighthouseSession(settings, lambda _push: None))
    await asyncio.gather(*(client.start() for client in clients))

    def asking(step: int, failures: int = 0) -> list[asyncio.Future]:
        return [
            asyncio.ensure_future(client.quorum(quorum_request(step, commit_failures=failures))) for client in clients
        ]

    seen = []
    for restart in range(3):
        before = await asyncio.gather(*asking(2 * restart))
        changed = await asyncio.gather(*asking(2 * restart, 1))
        assert {answer.quorum_id for answer in changed} == {before[0].quorum_id + 1}
        requests = asking(2 * restart + 1)
        await server.end(signal.SIGKILL)
        await server.start()
        after = await asyncio.gather(*requests)
        assert len({(answer.epoch, answer.quorum_id) for answer in after}) == 1
        assert after[0].quorum_id >= changed[0].quorum_id
        seen.append((changed[0].epoch, changed[0].quorum_id))
    assert seen == sorted(set(seen))
    assert clients[0].epoch >= 3

    async with aiohttp.ClientSession() as http, http.get(f"{server.address}/v1/jobs/job/events") as response:
        events = (await response.json())["events"]
    numbers = [event["id"] for event in events]
    assert numbers == sorted(set(numbers))
    assert len({event["epoch"] for event in events}) >= 3, "events from before the last kill are gone"

    await asyncio.gather(*(client.leave("done", DEADLINE) for client in clients))
    await asyncio.gather(*(client.close() for client in clients))
    assert await server.end(signal.SIGTERM) == 0
    history = check_files([tmp_path])
    assert history.fine, history.violations
    assert history.epochs == 4


async def test_members_that_do_not_come_back_are_waited_for_then_lost(tmp_path: Path) -> None:
    url, policy = f"sqlite://{tmp_path}/x.db", Policy(min_replicas=1, takeover_grace=0.3)
    async with lighthouse(store=url, policy=policy) as one, workers(one.address, 2) as members:
        await round_of(members)
    async with lighthouse(store=url, policy=policy) as one, worker(one.address, epoch_seen=1) as back:
        assert back.welcome.quorum_id == 1
        await back.ask(1)
        await eventually(lambda: one.jobs["job"].core.reason(0.0).code == "takeover_grace")
        assert (await back.next(MemberLost)).replica_id == "r1:1"
        answer = await back.next(Quorum)
        assert ([m.replica_id for m in answer.members or ()], answer.quorum_id) == (["r0:1"], 2)


async def test_a_changed_policy_outlives_the_lighthouse_which_says_once_that_it_is_not_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        found = [one.getMessage() for one in caplog.records]
        caplog.clear()
        return [one for one in found if one.startswith("stored policy differs from the settings")]

    url, flags = f"sqlite://{tmp_path}/x.db", Policy(min_replicas=2, join_timeout=7.0)
    async with (
        lighthouse(store=url, policy=flags) as one,
        worker(one.address),
        aiohttp.ClientSession() as http,
        http.patch(f"{one.address}/v1/jobs/job", json={"min_replicas": 3}) as answer,
    ):
        assert answer.status == 202
    async with lighthouse(store=url, policy=replace(flags, heal_timeout=9.0)) as one:
        assert one.jobs["job"].core.record.policy == replace(flags, min_replicas=3)
        one._term_is_over("to see whether the next term says it again")
        await eventually(lambda: one.term is not None)
    (sentence,) = said()
    for part in (
        "job=job",
        "keeps={'min_replicas': 3, 'heal_timeout': 60.0}",
        "for_new_jobs={'min_replicas': 2, 'heal_timeout': 9.0}",
        "keepstep policy job --min-replicas ... --heal-timeout ...",
    ):
        assert part in sentence
    async with lighthouse(store=url, policy=replace(flags, min_replicas=3)):
        pass
    assert not said()


async def test_evictions_outlive_the_lighthouse(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/x.db"
    async with lighthouse(store=url) as one, worker(one.address) as member, aiohttp.ClientSession() as http:
        await round_of([member])
        body = {"reason": "bad host", "ban_seconds": 1000}
        async with http.post(f"{one.address}/v1/jobs/job/replicas/r0/evict", json=body) as answer:
            assert answer.status == 202
        await member.ended()
    async with lighthouse(store=url) as one, connection(one.address, "r0:2") as banned:
        await banned.hello()
        refused = await banned.refusal()
        assert (refused.code, "bad host" in refused.reason) == ("banned", True)
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{one.address}/v1/jobs/job/replicas/r0/readmit") as answer,
        ):
            assert answer.status == 202
        async with worker(one.address, "r0:2") as back:
            assert isinstance(back.welcome, Welcome)
