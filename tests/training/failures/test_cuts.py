"""The network between two parts of a job fails. Training goes on, no process exits, the history holds.

Each cut is made twice: by proxies, which end or hold the connections that go through them; and, where there can be
network namespaces, by a router that drops every packet, as networks do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep_mesh.testing import ChaosProxy
from tests.support.jobs.job import Group, Job
from tests.support.jobs.mesh import Mesh, Others
from tests.support.network.namespaces import Namespaces, why_not
from tests.support.services.etcd_server import EtcdCluster

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

IMPATIENT = "--heartbeat-timeout", "2"


@contextmanager
def apart(folder: Path, *flags: str, min_replicas: int = 1) -> Iterator[Mesh]:
    if reason := why_not():
        pytest.skip(reason)
    with Namespaces() as network, EtcdCluster(folder, host=network.host("etcd")) as etcd:
        yield Mesh(etcd, *flags, min_replicas=min_replicas, network=network)


@pytest.fixture(params=["proxies", "namespaces"])
def mesh(request: pytest.FixtureRequest, etcd: EtcdCluster, tmp_path: Path) -> Iterator[Mesh]:
    if request.param == "proxies":
        yield Mesh(etcd, *IMPATIENT, min_replicas=2, proxied=True)
    else:
        with apart(tmp_path, *IMPATIENT, min_replicas=2) as mesh:
            yield mesh


@pytest.mark.parametrize("others", ["etcd", "lighthouses", "workers"])
async def test_a_leader_that_some_do_not_reach_is_succeeded_without_a_second_leader(mesh: Mesh, others: Others) -> None:
    async with mesh:
        a, b = [await mesh.start(name) for name in ("a", "b")]
        await mesh.advance(a, b)
        leader = await mesh.leader(followed=True)
        mesh.cut(leader, others)
        await mesh.succeeded(leader)
        await mesh.advance(a, b)
        mesh.mend()
        await mesh.leader(followed=True)  # on a busy machine a leader may change once more
        await mesh.advance(a, b)
        mesh.assert_all_live()
        assert mesh.assert_identical() >= 10


async def test_a_group_that_reaches_nobody_is_left_behind_and_comes_back(tmp_path: Path) -> None:
    with apart(tmp_path, *IMPATIENT) as mesh:
        async with mesh:
            a, b, c = [await mesh.start(name) for name in ("a", "b", "c")]
            await mesh.advance(a, b, c)
            mesh.isolate(c)
            await mesh.until(lambda: alone(a) and alone(b), "a and b commit without c")
            await mesh.advance(a, b)
            mesh.mend()
            await mesh.advance(a, b, c)
            mesh.assert_all_live()
            assert mesh.assert_identical() >= 20


def alone(group: Group) -> bool:
    """Its last commit was that of two groups."""
    batches = [event["batches"] for event in group.lines[-5:] if event["event"] == "committed"]
    return len(batches) > 1 and batches[-1] - batches[-2] == 2


async def test_a_group_that_does_not_reach_the_lighthouse_is_left_behind_and_comes_back() -> None:
    async with Job(*IMPATIENT) as job, ChaosProxy.before(job.address) as proxy:
        a, b = [await job.start(name) for name in ("a", "b")]
        c = await job.start("c", lighthouse=proxy.url)
        await job.advance(a, b, c)
        proxy.freeze()
        await job.until(lambda: alone(a) and alone(b), "a and b commit without c")
        await job.advance(a, b)
        proxy.thaw()
        await job.advance(a, b, c)
        job.assert_all_live()
        assert job.assert_identical() >= 20
