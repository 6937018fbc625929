"""A metrics service that has a lighthouse drain a straggler, each with tokens of its own roles."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from keepstep_mesh.protocol.messages import Drain, Welcome
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tokens import ClientToken, Tokens
from keepstep_metrics.app import Metrics
from keepstep_metrics.lighthouse import draining
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import DEADLINE, Worker, connection, eventually, lighthouse, round_of
from tests.support.services.metrics_driver import JOB, Client, Teller, client, metrics, step

SILENT = {"heartbeat_timeout": DEADLINE, "reconnect_grace": DEADLINE}
"""The workers of these tests send no heartbeats."""
TOKENS = Tokens(worker="worker-" * 3, service="service-" * 3, admin="admin-" * 4)
NAMES = ("r0:1", "r1:1", "r2:1")


@contextlib.asynccontextmanager
async def members_at(address: str) -> AsyncIterator[list[Worker]]:
    """Three groups that have committed three steps."""
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for name in NAMES:
            how = connection(address, name, JOB, Authorization=f"Bearer {TOKENS.worker}")
            members.append(await stack.enter_async_context(how))
            await members[-1].hello()
            await members[-1].next(Welcome)
        for number in range(4):
            await round_of(members, number)
        yield members


async def until_slow(worker: Client) -> dict[str, Any]:
    """Report steps until ``r2`` has been a straggler in more than five of them. Return the answer about it."""
    tellers = {name: Teller(name) for name in NAMES}
    busy = dict(zip(NAMES, (0.1, 0.11, 0.5), strict=True))
    async with asyncio.timeout(DEADLINE):
        for number in itertools.count(1):
            for name in NAMES:
                await worker.tell(tellers[name], step(time.time(), number, 0.05, busy_seconds=busy[name]))
            slow = [one for one in (await worker.get("stragglers"))["groups"] if one["steps"] > 5]
            if slow:
                break
            await asyncio.sleep(0.05)  # a step takes its time, and groups are compared once a second
    assert [one["name"] for one in slow] == ["r2"]
    found: dict[str, Any] = slow[0]
    return found


async def test_a_service_token_has_a_straggler_drained_in_a_job_whose_policy_says_so() -> None:
    policy = Policy(min_replicas=2, **SILENT)
    settings = {"tokens": TOKENS, "token": ClientToken.of(TOKENS.service)}
    async with (
        lighthouse(tokens=TOKENS, policy=policy) as known,
        metrics(lighthouses=(known.address,), **settings) as one,
        client(one.address, TOKENS.worker) as worker,
        client(known.address, TOKENS.admin) as admin,
        members_at(known.address) as members,
    ):
        await eventually(lambda: one.is_registered)
        slow = await until_slow(worker)
        await admin.call("PATCH", f"/v1/jobs/{JOB}", 202, json={"drain_straggler_after": 3})
        reason = (await members[2].until(Drain)).reason
        assert reason.startswith(f"it was a straggler for {slow['steps']} steps in a row: it needs 0.5 s for a step")
        (event,) = [it for it in (await admin.get("events"))["events"] if it["kind"] == "drain"]
        assert (event["replica_id"], event["detail"]) == ("r2:1", {"reason": reason, "by": "service at 127.0.0.1"})
        found = await worker.until("events", lambda it: it["events"] and it["events"][-1]["event"] == "drain")
        assert found["events"][-1]["sentence"] == f"service at 127.0.0.1 drained r2: {reason}"


async def test_a_straggler_that_cannot_be_spared_stays_and_is_asked_for_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draining, "STRAGGLER_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(draining, "DRAIN_RETRY_SECONDS", 0.05)
    policy = Policy(min_replicas=3, drain_straggler_after=3, **SILENT)
    settings = {"tokens": TOKENS, "token": ClientToken.of(TOKENS.service)}
    async with (
        lighthouse(tokens=TOKENS, policy=policy) as known,
        members_at(known.address) as members,
        metrics(lighthouses=(known.address,), **settings) as one,
        client(one.address, TOKENS.worker) as worker,
        client(known.address, TOKENS.admin) as admin,
    ):
        await until_slow(worker)
        await eventually(lambda: caplog.text.count("2 would be left, and min_replicas is 3") > 1)
        assert "drain" not in [it["kind"] for it in (await admin.get("events"))["events"]]
        await admin.call("PATCH", f"/v1/jobs/{JOB}", 202, json={"min_replicas": 2})
        await members[2].until(Drain)


async def test_a_drain_that_comes_to_a_standby_goes_on_to_the_leader(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(min_replicas=2, drain_straggler_after=3, **SILENT)
    mesh = {"store": f"{etcd.address}/{uuid.uuid4()}", "tokens": TOKENS, "policy": policy}
    async with lighthouse(**mesh) as leader, lighthouse(**mesh) as standby:
        monkeypatch.setattr(Metrics, "_lighthouse", lambda _: standby.address)
        async with (
            metrics(tokens=TOKENS, token=ClientToken.of(TOKENS.service)) as one,
            client(one.address, TOKENS.worker) as worker,
            members_at(leader.address) as members,
        ):
            await until_slow(worker)
            assert (await members[2].until(Drain)).reason.startswith("it was a straggler for ")


async def test_a_worker_token_drains_nobody() -> None:
    policy = Policy(drain_straggler_after=1, **SILENT)
    async with (
        lighthouse(tokens=TOKENS, policy=policy) as known,
        members_at(known.address),
        client(known.address, TOKENS.worker) as worker,
    ):
        body = {"steps": 1000, "seconds": 1.0, "median_seconds": 0.1}
        said = await worker.call("POST", f"/v1/jobs/{JOB}/replicas/r2:1/straggler", 403, json=body)
        assert "a worker token may not do this" in said["detail"]
        assert not any(it.draining for it in known.jobs[JOB].core.replicas(0.0))
