"""Fault runs that hit groups, their network, and the relay."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from tests.faults.row import TURN_SECONDS, Run
from tests.support.jobs.endings import finish_under_kills
from tests.support.jobs.job import DEADLINE, Group, Job, lost_steps
from tests.support.jobs.mesh import Mesh
from tests.support.jobs.samples import taken_once
from tests.support.services.relay_driver import metric, relay_process

SEVERAL_CHUNKS = {"TRAINER_WIDTH": "12000"}
"""10 MiB of state."""
RETRIES = {"KEEPSTEP_RETRY_ALLREDUCE": "1", "TRAINER_PACE": "0.005"}
ELASTIC = {"TRAINER_ELASTIC": "1", "TRAINER_WORKERS": "1", "TRAINER_PACE": "0.01"}
SETTLING_HEALS = 20
"""Heals after which a trainer uses no more resources, except for ``MAX_GROWTH_BYTES``."""
MAX_GROWTH_BYTES = 128 << 20
MORE_CONNECTIONS = 1
"""Each quorum has its store at another group. That one accepts two connections; the other two open one each."""

# ---- groups


async def group_and_leader_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, (a, b, c)):
        for _ in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                c.kill()
                await mesh.stop_node(leader, signal.SIGKILL)
                await mesh.restart_node(leader)
            await mesh.start("c")
            await mesh.advance(a, b, c)


async def group_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with run.gap(mesh, *others):
                victim.kill()
            await mesh.start(victim.name)
            await mesh.advance(*groups)


async def group_killed_with_retries(run: Run) -> None:
    """Kill at any moment of a step."""
    at = random.Random(3)
    async with run.mesh("a", "b", "c", **RETRIES) as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            since = time.time()
            async with run.gap(mesh, *others):
                await asyncio.sleep(at.uniform(0.0, 0.2))  # any moment of a step
                victim.kill()
            assert not (lost := lost_steps(since, *others)), f"discarded: {lost}"
            await mesh.start(victim.name, **RETRIES)
            await mesh.advance(*groups)
        retried = sum((mesh.logs / f"{group.name}.jsonl").read_text().count('"retried"') for group in groups)
        assert retried, "no kill was in the middle of a step"


async def samples_taken_once(run: Run) -> None:
    """Groups die and join at any moment; the first one stays."""
    at = random.Random(4)
    async with run.mesh("a", "b", "c", **ELASTIC) as (mesh, groups):
        first, *others = groups
        for turn in run.turns:
            victim = others[turn % 2]
            async with run.gap(mesh, first):
                await asyncio.sleep(at.uniform(0.0, 0.2))  # any moment of a step
                victim.kill()
                await asyncio.sleep(at.uniform(0.0, 2.0))  # the other groups take some steps, or none
                await mesh.start(victim.name, **ELASTIC)
        await mesh.advance(*groups)
        epochs = taken_once(*groups)
        assert epochs, "no epoch was completed"


async def sessions_closed(run: Run) -> None:
    """The grace is long, so that on a busy machine only a port could end a living group."""
    async with run.mesh("a", "b", "c", proxied=True, flags=("--reconnect-grace", "4")) as (mesh, groups):
        for _ in run.turns:
            since = time.time()
            async with asyncio.timeout(TURN_SECONDS):
                mesh.cut_sessions()
                await mesh.advance(*groups, steps=2)
            run.note(max(group.longest_gap(since) for group in groups))
        closed, lost = len(mesh.events("suspect")), mesh.events("lost")
        assert closed >= 0.9 * len(run.turns) * len(groups), f"only {closed} sessions were closed"
        assert not lost, f"lost: {lost[0]}"


async def group_frozen(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with run.gap(mesh, *others):
                victim.kill(number=signal.SIGSTOP)
            victim.kill(number=signal.SIGCONT)
            await mesh.advance(*groups)


async def group_isolated(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with run.gap(mesh, *others):
                mesh.isolate(victim)
            mesh.mend()
            await mesh.advance(*groups)


async def group_killed_while_it_catches_up(run: Run) -> None:
    at = random.Random(2)
    settings = {"TRAINER_CATCH_UP": "1", "TRAINER_BATCH_NORM": "1", **SEVERAL_CHUNKS}
    async with run.mesh("a", "b", "c", **settings) as (mesh, groups):
        a, b, c = groups
        for _ in run.turns:
            c.kill()
            await mesh.advance(a, b)
            async with run.gap(mesh, a, b):
                await mesh.start("c", **settings, TRAINER_CHUNK_SECONDS="0.5")
                await mesh.until(lambda: c.lines[-1]["event"] == "followed", "it follows the others")
                await asyncio.sleep(at.uniform(0.0, 5.0))  # any moment of the catch-up
                c.kill()
                await mesh.advance(a, b)
            await mesh.start("c", **settings)
            await mesh.advance(*groups)


async def groups_killed_at_the_end(run: Run) -> None:
    async with Job() as job:
        for turn in run.turns:
            run.note(await finish_under_kills(job, f"end-{turn}", random.Random(turn)))
            run.outcome.compared += job.assert_identical()
            for group in job.groups.values():
                await group.gone()
            job.groups.clear()  # the next job has steps and quorums of the same numbers
    run.outcome.take(job.history)


# ---- relays


async def relay_killed(run: Run) -> None:
    at = random.Random(1)
    async with run.mesh("a", "b", "c", **SEVERAL_CHUNKS) as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with _relay(mesh) as (relay, _):
                victim.kill()
                await mesh.advance(*others)
                heals = _heals(mesh, victim)
                async with run.gap(mesh, *others):
                    await mesh.start(victim.name, **SEVERAL_CHUNKS)
                    await mesh.until(lambda group=victim: group.lines[-1]["event"] == "started", "it started")
                    await asyncio.sleep(at.uniform(0.0, 0.3))  # any moment of the heal
                    relay.kill()
                    await mesh.advance(*groups, steps=1)
                assert _heals(mesh, victim) > heals, "it did not heal"


async def healed_through_relay(run: Run) -> None:
    async with run.mesh("a", "b", "c", **SEVERAL_CHUNKS) as (mesh, groups), _relay(mesh) as (_, url):
        survivor, victim = psutil.Process(groups[0].ranks[0].pid), groups[2]
        settled: tuple[int, int, int] | None = None
        for turn in run.turns:
            sent = await metric(url, "sent_bytes_total")
            async with asyncio.timeout(TURN_SECONDS):
                victim.kill()
                await mesh.advance(*groups[:2], steps=1)
                since = time.time()
                await mesh.start(victim.name, **SEVERAL_CHUNKS)
                await mesh.advance(*groups, steps=1)
            run.note(max(group.longest_gap(since) for group in groups[:2]))
            assert await metric(url, "sent_bytes_total") > sent, "it did not heal through the relay"
            if turn == SETTLING_HEALS:
                settled = _resources(survivor)
        if settled is not None:
            threads, descriptors, memory = settled
            most = threads, descriptors + MORE_CONNECTIONS, memory + MAX_GROWTH_BYTES
            await mesh.until(
                lambda: all(now <= limit for now, limit in zip(_resources(survivor), most, strict=True)),
                f"at most {most} threads, descriptors and bytes; after {SETTLING_HEALS} heals {settled}",
            )


@asynccontextmanager
async def _relay(mesh: Mesh) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a relay that is registered with the lighthouse."""
    async with relay_process("--lighthouse", mesh.address) as (process, url):
        async with asyncio.timeout(DEADLINE):
            while not await metric(url, "registered"):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.02)
        yield process, url


def _heals(mesh: Mesh, group: Group) -> int:
    return (mesh.logs / f"{group.name}.jsonl").read_text().count('"healed"')


def _resources(process: psutil.Process) -> tuple[int, int, int]:
    """Numbers of threads and descriptors, and resident bytes."""
    return process.num_threads(), process.num_fds(), process.memory_info().rss
