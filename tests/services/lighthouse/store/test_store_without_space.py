"""A store that answers and accepts no writes: every command that shows health says so, and it heals by itself."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep_cli.doctor import probes
from keepstep_lighthouse.jobs import lighthouse_node
from keepstep_lighthouse.store.contract import StoreError
from keepstep_lighthouse.store.opening import open_store
from keepstep_mesh.protocol.messages import Quorum
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tls import TlsFiles
from tests.services.lighthouse.store.test_etcd_store import ETCDCTL, compact
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import DEADLINE, eventually, lighthouse, round_of, worker, workers

QUOTA_BYTES = 4 << 20


async def fill(store: str) -> None:
    """Write until etcd raises its alarm NOSPACE."""
    filler = await open_store(store)
    try:
        with pytest.raises(StoreError, match=r"database space exceeded; .*alarm disarm"):
            for number in range(100):
                await filler.put("filler", bytes([number]) * (1 << 19))
    finally:
        await filler.close()


def repair(cluster: EtcdCluster) -> None:
    (node,) = cluster.nodes
    compact(node)
    for words in (("defrag",), ("alarm", "disarm")):
        subprocess.check_output([ETCDCTL, "--endpoints", f"127.0.0.1:{node.port}", *words])


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with http.get(url) as answer:
        return answer.status, await answer.json(content_type=None)


async def until_ready(http: aiohttp.ClientSession, address: str, status: int) -> str:
    """Return the reason."""
    async with asyncio.timeout(DEADLINE):
        while True:
            found, answer = await get(http, f"{address}/readyz")
            if found == status:
                return str(answer.get("detail", ""))
            await asyncio.sleep(0.05)  # nothing tells it


async def test_an_etcd_without_space_is_seen_by_leader_and_standby_and_named_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lighthouse_node, "TRY_STORE_SECONDS", 0.2)
    flags = ("--quota-backend-bytes", str(QUOTA_BYTES))
    with EtcdCluster(tmp_path / "etcd", flags=flags) as cluster:
        store, policy = f"{cluster.address}/t", Policy(heartbeat_timeout=60.0)
        async with (
            lighthouse(store=store, policy=policy) as leader,
            lighthouse(store=store, policy=policy) as standby,
            aiohttp.ClientSession() as http,
            workers(leader.address, 2) as members,
        ):
            await round_of(members)
            await fill(f"{cluster.address}/other")
            for one in (leader, standby):  # although no job writes
                assert "database space exceeded" in await until_ready(http, one.address, 503)
            _, seen = await get(http, f"{leader.address}/v1/cluster")
            assert "database space exceeded" in seen["store"]["trouble"]
            assert (
                "database space exceeded"
                in (await probes._probe(http, "lighthouse", leader.address, TlsFiles())).not_ready
            )
            async with http.get(f"{leader.address}/metrics") as answer:
                assert "keepstep_lighthouse_store_trouble 1.0" in (await answer.text()).splitlines()
            async with worker(leader.address, "r2:1") as joiner:
                three = [joiner, *members]
                for one in three:
                    await one.ask(1)
                await eventually(lambda: leader.jobs["job"].term.trouble is not None)  # the new quorum is written first
                _, view = await get(http, f"{leader.address}/v1/jobs/job/quorum")
                assert view["reason"]["code"] == "store"
                assert "database space exceeded" in view["reason"]["sentence"]
                await asyncio.to_thread(repair, cluster)
                for one in (leader, standby):
                    await until_ready(http, one.address, 200)
                for one in three:  # without a restart
                    assert {member.replica_id for member in (await one.until(Quorum)).members} >= {"r0:1", "r1:1"}
                _, view = await get(http, f"{leader.address}/v1/jobs/job/quorum")
                assert (view["reason"]["code"], len(view["members"])) == ("fast", 3)


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
async def test_an_idle_lighthouse_notices_that_its_disk_is_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lighthouse_node, "TRY_STORE_SECONDS", 0.2)
    async with (
        lighthouse(store=f"sqlite://{small_disk}/store.db") as one,
        aiohttp.ClientSession() as http,
    ):
        await until_ready(http, one.address, 200)
        big = small_disk / "big"
        with pytest.raises(OSError, match="No space left"), big.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert "accepts no writes" in await until_ready(http, one.address, 503)
        big.unlink()
        await until_ready(http, one.address, 200)
