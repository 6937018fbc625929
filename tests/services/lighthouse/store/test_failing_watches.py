"""A store whose watches fail again and again fills no log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from keepstep_lighthouse.leadership import campaign, nodes
from keepstep_lighthouse.leadership.campaign import Leadership
from keepstep_lighthouse.leadership.leader_link import LeaderLink
from keepstep_lighthouse.leadership.nodes import Nodes
from keepstep_lighthouse.registry import service_registry
from keepstep_lighthouse.registry.service_registry import Registry
from keepstep_lighthouse.store.contract import Store, StoreError, Watch
from keepstep_lighthouse.store.memory_store import MemoryStore
from keepstep_lighthouse.store.opening import open_store
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.net.http import Identity
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import eventually


class FailingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def watch(self, prefix: str) -> Watch:
        self.failures += 1
        raise StoreError(f"{prefix}: {'refused' if self.failures <= 2 else 'timed out'}")


async def follow_leader(store: Store) -> None:
    leadership = Leadership(store, "n", "http://n:1", 3.0, LeaderLink(Identity()), lambda _: None, lambda _: None)
    await leadership._watch()


async def follow_nodes(store: Store) -> None:
    await Nodes(store, "n", "http://n:1", 3.0)._follow()


async def follow_services(store: Store) -> None:
    async with Registry(lambda: None).following(store):
        await asyncio.Event().wait()


@pytest.mark.parametrize("follow", [follow_leader, follow_nodes, follow_services])
async def test_a_watch_that_keeps_failing_is_logged_once_for_each_reason(
    follow: Callable[[Store], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(campaign, "WATCH_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(nodes, "NODES_WATCH_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(service_registry, "FOLLOW_AGAIN_SECONDS", 0.001)
    store = FailingStore()
    following = asyncio.create_task(follow(store))
    await eventually(lambda: store.failures > 4)
    await cancelled(following)
    first, second = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ": refused" in first
    assert ": timed out" in second


async def test_a_follower_without_its_etcd_logs_each_failure_once_though_it_tries_to_lead_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(campaign, "TRY_AGAIN_SECONDS", 0.001)
    with EtcdCluster(tmp_path) as cluster:
        store = await open_store(f"{cluster.address}/x")
        leadership = Leadership(store, "n", "http://n:1", 0.2, LeaderLink(Identity()), lambda _: None, lambda _: None)
        leadership.core.heard(None)
        cluster.nodes[0].kill()
        for _ in range(5):
            await leadership._take(None)
            await leadership._look()
        said = [record.getMessage() for record in caplog.records if "keepstep" in record.name]
        assert sum("cannot begin a term" in one for one in said) == 1
        assert sum("cannot read the leader" in one for one in said) == 1
        await store.close()
