"""A service whose address was given as that of another kind says what it is, and where the right one is."""

from __future__ import annotations

import pytest

from keepstep_cli.asking.rest import Lighthouse, Relay
from keepstep_cli.errors import Refused, Unreachable
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.net import http
from keepstep_mesh.protocol.messages import OLDEST_PROTOCOL_VERSION
from keepstep_mesh.security.tokens import ClientToken, Tokens
from keepstep_mesh.serving.service_kind import as_seen_from
from tests.services.cli.scene import keepstep, running
from tests.services.session.worker import Worker
from tests.support.services.metrics_driver import metrics
from tests.support.services.relay_driver import relay

LIGHTHOUSE = "http://127.0.0.1:29510"
TOKENS = Tokens(worker="worker-token-of-the-test", admin="admin-token-of-the-test")


async def test_a_command_names_the_service_that_answers_and_the_lighthouse() -> None:
    async with metrics(lighthouses=(LIGHTHOUSE,)) as other:
        said = await keepstep("status", "--lighthouse", other.address)
    assert (said.code, said.out) == (3, "")
    assert (
        f"{other.address}: this is a metrics service, not a lighthouse; the lighthouse is at {LIGHTHOUSE}" in said.err
    )
    assert said.err.endswith(f"Use --lighthouse {LIGHTHOUSE}.\n")


async def test_an_order_is_refused_before_a_service_carries_it_out() -> None:
    async with metrics(lighthouses=(LIGHTHOUSE,)) as other:
        with pytest.raises(Unreachable, match="this is a metrics service, not a lighthouse"):
            await Lighthouse(other.address, None).post("jobs", "default", "replicas", "r0", "drain", reason="a test")


async def test_a_relay_and_a_lighthouse_are_told_apart() -> None:
    async with running("r0") as job, relay(lighthouses=(job.lighthouse.address,)) as other:
        with pytest.raises(Unreachable, match=f"this is a relay, not a lighthouse.*at {job.lighthouse.address}"):
            await Lighthouse(other.address, None).get("cluster")
        with pytest.raises(Unreachable, match="this is a lighthouse, not a relay"):
            await Relay(job.lighthouse.address, None).get("jobs", "default", "checkpoints")


async def test_the_right_lighthouse_of_two_addresses_is_used() -> None:
    async with running("r0") as job, metrics() as other:
        cluster = await Lighthouse(f"{other.address},{job.lighthouse.address}", None).get("cluster")
        assert cluster["leader"] == job.lighthouse.address


async def test_a_worker_ends_at_once_with_the_same_sentence() -> None:
    async with metrics(lighthouses=(LIGHTHOUSE,)) as other:
        worker = Worker(other.address)
        with pytest.raises(ProtocolError, match="this is a metrics service, not a lighthouse; the lighthouse is at"):
            await worker.session.start()


async def test_a_service_refuses_another_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("r0") as job:
        await Lighthouse(job.lighthouse.address, None).get("cluster")
        monkeypatch.setattr(http, "PROTOCOL_VERSION", OLDEST_PROTOCOL_VERSION - 1)
        with pytest.raises(
            Refused, match=f"speaks protocol {OLDEST_PROTOCOL_VERSION - 1}, this service needs at least"
        ):
            await Lighthouse(job.lighthouse.address, None).get("cluster")


async def test_addresses_are_for_clients_that_may_read() -> None:
    async with metrics(lighthouses=(LIGHTHOUSE,), tokens=TOKENS) as other:
        with pytest.raises(Unreachable) as without:
            await Lighthouse(other.address, None).get("cluster")
        with pytest.raises(Unreachable) as with_token:
            await Lighthouse(other.address, ClientToken({"KEEPSTEP_TOKEN": str(TOKENS.admin)})).get("cluster")
    assert "not a lighthouse" in without.value.message
    assert LIGHTHOUSE not in without.value.message
    assert LIGHTHOUSE in with_token.value.message


def test_an_address_on_loopback_is_named_as_the_client_reaches_that_machine() -> None:
    assert as_seen_from("127.0.0.1", "127.0.0.1", LIGHTHOUSE) == LIGHTHOUSE
    assert as_seen_from("10.0.0.9", "head", LIGHTHOUSE) == "http://head:29510"
    assert as_seen_from("10.0.0.9", "fe80::1", "https://[::1]:1") == "https://[fe80::1]:1"
    assert as_seen_from("10.0.0.9", "head", "http://l1:29510") == "http://l1:29510"
