"""Fault runs that hit lighthouses and etcd."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

import aiohttp

from tests.faults.row import HEARTBEAT_TIMEOUT, STEPS_AFTER, TURN_SECONDS, Run, first_event_after
from tests.support.jobs.job import DEADLINE, Group, discarded
from tests.support.jobs.mesh import Mesh, Others

FROZEN_SECONDS = 30.0
MEMBERS_CHANGE_EVERY = 5
"""Kills of the leader between two changes of members, so that quorums are formed under many leaders."""

# ---- the leader


async def leader_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c", min_replicas=2) as (mesh, (a, b, c)):
        for turn in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                await mesh.stop_node(leader, signal.SIGKILL)
                await mesh.restart_node(leader)
            if turn % MEMBERS_CHANGE_EVERY == 0:
                c.kill()
                await mesh.advance(a, b)
            elif turn % MEMBERS_CHANGE_EVERY == 1:
                await mesh.start("c")
                await mesh.advance(a, b, c)
        if run.outcome.wanted % MEMBERS_CHANGE_EVERY == 1:
            await mesh.start("c")
            await mesh.advance(a, b, c)
    found = run.outcome
    assert found.epochs > found.wanted, f"{found.epochs} epochs after {found.wanted} leaders were killed"
    changes = found.wanted // MEMBERS_CHANGE_EVERY
    assert found.quorums > 2 * changes, f"{found.quorums} quorum_ids, and members changed {2 * changes} times"


async def leader_stopped(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
        for _ in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                assert await mesh.stop_node(leader, signal.SIGTERM) == 0, "the exit code is not 0"
                await mesh.restart_node(leader)
        assert not (lost := discarded(a, b)), f"a hand-over cost a step: {lost[0]}"


async def leader_frozen(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
        for _ in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                await mesh.signal_node(leader, signal.SIGSTOP)
                thaw_at = time.monotonic() + FROZEN_SECONDS
                successor = await mesh.leader()
                assert successor != leader
                while time.monotonic() < thaw_at:
                    await mesh.advance(a, b)
                before = await _decided(mesh, successor)
                await mesh.signal_node(leader, signal.SIGCONT)
                await mesh.advance(a, b, steps=STEPS_AFTER)
            assert await mesh.leader(followed=True) == successor, "the frozen lighthouse leads again"
            assert await _decided(mesh, successor) == before, "the frozen lighthouse changed the epoch or the quorum"


async def _decided(mesh: Mesh, node: int) -> tuple[int, int]:
    """Epoch and quorum_id by the REST API of one lighthouse."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE), raise_for_status=True) as http:
        async with http.get(f"{mesh.addresses[node]}/v1/cluster") as answer:
            epoch = (await answer.json())["epoch"]
        async with http.get(f"{mesh.addresses[node]}/v1/jobs/default/quorum") as answer:
            return epoch, (await answer.json())["quorum_id"]


def leader_without(others: Others) -> Callable[[Run], Awaitable[None]]:
    async def play(run: Run) -> None:
        async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
            for _ in run.turns:
                leader = await mesh.leader(followed=True)
                async with run.gap(mesh, a, b):
                    mesh.cut(leader, others)
                    await mesh.succeeded(leader)
                    await mesh.advance(a, b)
                    mesh.mend()

    return play


async def lighthouses_killed(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
        for _ in run.turns:
            await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                for number in (0, 1):
                    await mesh.stop_node(number, signal.SIGKILL)
                for number in (0, 1):
                    await mesh.restart_node(number)


# ---- etcd


async def etcd_node_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c", min_replicas=2, nodes=3) as (mesh, (a, b, c)):
        for turn in run.turns:
            await mesh.leader(followed=True)
            node = run.etcd.nodes[turn % 3]
            async with run.gap(mesh, a, b):
                node.kill()
                c.kill()  # changes the members, which needs a write
            await mesh.start("c")
            await mesh.advance(a, b, c)
            node.start()
            await asyncio.to_thread(node.wait)


async def etcd_majority_killed(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2, nodes=3) as (mesh, (a, b)):
        for turn in run.turns:
            await mesh.leader(followed=True)
            first, second = [run.etcd.nodes[(turn + one) % 3] for one in (0, 1)]
            async with asyncio.timeout(TURN_SECONDS):
                first.kill()
                second.kill()
                await _stands_still(a, b)
                started = time.time()
                first.start()
                await mesh.advance(a, b, steps=STEPS_AFTER)
            run.note(first_event_after(started, a, b) - started)
            second.start()
            await asyncio.to_thread(second.wait)


async def _stands_still(*groups: Group) -> None:
    while time.time() - max(group.lines[-1]["t"] for group in groups) < HEARTBEAT_TIMEOUT:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
