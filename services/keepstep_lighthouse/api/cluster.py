"""The answer of ``GET /v1/cluster``: the lighthouses, their leader, the services, and whether the store works."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.leadership.term import EPOCH_KEY, parse_epoch
from keepstep_lighthouse.registry.service_records import ServiceRecord
from keepstep_lighthouse.store.contract import Store, StoreError

STORE_PROBE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class NodeView:
    address: str
    leads: bool
    epoch: int
    trouble: str | None
    """Why it cannot decide now; None: it can, or follows a leader."""


@dataclass(frozen=True, slots=True)
class StoreView:
    kind: str
    """``memory``, ``sqlite`` or ``etcd``."""
    trouble: str | None
    """Why the last read failed, or why it accepts no writes; None: it works."""
    read_seconds: float | None = None
    """Duration of that read; None: it failed."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    leader: str | None
    epoch: int
    nodes: tuple[NodeView, ...]
    services: tuple[ServiceRecord, ...]
    """Sorted by kind and name."""
    store: StoreView


async def lighthouses(lighthouse: LighthouseNode, here: str) -> tuple[NodeView, ...]:
    """Return all lighthouses of this cluster. ``here``: the address that the client used for this one."""
    epoch = lighthouse.term.epoch if lighthouse.term else 0
    if lighthouse.nodes is None or lighthouse.leadership is None:
        return (NodeView(here, lighthouse.term is not None, epoch, lighthouse.trouble),)
    leader = lighthouse.leadership.leader
    if leader is not None:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(STORE_PROBE_SECONDS):
                epoch = parse_epoch(await lighthouse.store.get(EPOCH_KEY))
    views = []
    for node, address in lighthouse.nodes.addresses.items():
        own = node == lighthouse.node
        leads = lighthouse.term is not None if own else leader is not None and leader.node == node
        views.append(NodeView(address, leads, epoch if leads else 0, lighthouse.not_ready() if own else None))
    return tuple(sorted(views, key=lambda one: one.address))


async def view(lighthouse: LighthouseNode, here: str) -> ClusterView:
    nodes = await lighthouses(lighthouse, here)
    leader = next((node for node in nodes if node.leads), None)
    began = time.monotonic()
    problem = await _store_problem(lighthouse.store)
    seconds = None if problem else time.monotonic() - began
    kind = lighthouse.settings.store.partition("://")[0]
    return ClusterView(
        leader=leader.address if leader else None,
        epoch=leader.epoch if leader else 0,
        nodes=nodes,
        services=lighthouse.registry.records,
        store=StoreView(kind, problem or lighthouse.write_trouble, seconds),
    )


async def _store_problem(store: Store) -> str | None:
    try:
        async with asyncio.timeout(STORE_PROBE_SECONDS):
            await store.get(EPOCH_KEY)
    except StoreError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {STORE_PROBE_SECONDS:g} s"
    return None
