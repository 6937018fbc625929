"""The coordinator dies, freezes, is cut off; etcd loses nodes. Training goes on, no process exits, the history holds.

That quorum_id and epoch only grow, that no step is counted twice and no deposed leader acts is what ``check-history``
finds in the logs at the end of each test (``Job``).
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, discarded
from tests.support.jobs.mesh import LEASE, Mesh
from tests.support.services.etcd_server import EtcdCluster

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]


async def two_groups(mesh: Mesh) -> tuple[Group, Group]:
    a, b = [await mesh.start(name) for name in ("a", "b")]
    await mesh.advance(a, b)
    return a, b


async def test_the_leader_is_killed_again_and_again(etcd: EtcdCluster):
    async with Mesh(etcd, min_replicas=2) as mesh:
        a, b = await two_groups(mesh)
        for _ in range(3):  # the third is one that was started again
            leader = await mesh.leader()
            await mesh.stop_node(leader, signal.SIGKILL)
            assert await mesh.leader() != leader
            await mesh.advance(a, b)
            await mesh.restart_node(leader)
        mesh.assert_all_live()
        for group in (a, b):  # a kill between the answers to two members costs this step
            broken = sum("round broken" in line for line in group.output)
            assert len(discarded(group)) <= broken, mesh.report()
        assert mesh.assert_identical() >= 15


async def test_a_leader_that_is_told_to_stop_hands_over(etcd: EtcdCluster):
    async with Mesh(etcd, min_replicas=2) as mesh:
        a, b = await two_groups(mesh)
        assert await mesh.stop_node(0, signal.SIGTERM) == 0
        assert await mesh.leader() == 1
        await mesh.advance(a, b)
        mesh.assert_all_live()
        assert not discarded(a, b), mesh.report()


async def test_a_group_dies_together_with_the_leader(etcd: EtcdCluster):
    async with Mesh(etcd) as mesh:
        a, b = await two_groups(mesh)
        b.kill()
        await mesh.stop_node(0, signal.SIGKILL)
        await mesh.advance(a)
        await mesh.start("b")
        await mesh.advance(a, b)
        mesh.assert_all_live()
        assert mesh.assert_identical() >= 8


async def test_a_frozen_leader_is_succeeded_and_changes_nothing_when_it_goes_on(etcd: EtcdCluster):
    async with Mesh(etcd, min_replicas=2) as mesh:
        a, b = await two_groups(mesh)
        await mesh.signal_node(0, signal.SIGSTOP)
        assert await mesh.leader() == 1
        await mesh.advance(a, b)
        await mesh.signal_node(0, signal.SIGCONT)
        await mesh.advance(a, b, steps=30)
        assert await mesh.leader() == 1
        mesh.assert_all_live()
        assert mesh.assert_identical() >= 20


async def test_both_lighthouses_are_killed_and_started_again(etcd: EtcdCluster):
    async with Mesh(etcd, min_replicas=2) as mesh:
        a, b = await two_groups(mesh)
        await mesh.stop_node(1, signal.SIGKILL)
        await mesh.advance(a, b)  # without a standby
        await mesh.stop_node(0, signal.SIGKILL)
        for number in (1, 0):
            await mesh.restart_node(number)
        await mesh.advance(a, b)
        mesh.assert_all_live()
        assert mesh.assert_identical() >= 10


async def test_an_etcd_of_three_loses_one_node_and_then_two(etcd: EtcdCluster, tmp_path: Path):
    with EtcdCluster(tmp_path / "etcd", size=3) as own:
        async with Mesh(own) as mesh:
            a, b = await two_groups(mesh)
            own.nodes[0].kill()
            b.kill()  # a change of membership, which has to be written
            await mesh.advance(a)
            await mesh.start("b")
            await mesh.advance(a, b)
            leader = await mesh.leader()
            own.nodes[1].kill()
            await mesh.advance(a, b)  # until the lease ends
            await mesh.not_ready(leader, "cannot ")
            await asyncio.sleep(1.5 * LEASE)  # the lease is over for a third of it, whatever the machine does
            assert time.time() - max(group.lines[-1]["t"] for group in (a, b)) > LEASE / 4, "they stand still"
            for node in own.nodes[:2]:
                node.start()
            await mesh.advance(a, b)
            mesh.assert_all_live()
            assert mesh.assert_identical() >= 20
