"""A service that registers with lighthouses, and stays registered."""

from __future__ import annotations

import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web

from keepstep_mesh.discovery.registration import Registration, registered
from keepstep_mesh.protocol.messages import Quorum, Services
from keepstep_mesh.security.tokens import Access, Tokens
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Service, serving
from tests.services.lighthouse.cluster.registrations import RELAY, TOLD, known
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import eventually, lighthouse, worker


async def test_a_service_is_registered_again_with_a_lighthouse_that_forgot_it() -> None:
    async with lighthouse() as first:
        port = first.address.rpartition(":")[2]
        short = Registration("relay", "relay-1", RELAY.address, ttl=1.5)
        async with registered([first.address], short) as registrar:
            await known(registrar)
            await first.stop()
            await eventually(lambda: registrar.lighthouse is None)
            assert "no lighthouse accepted the registration" in (registrar.trouble or "")
            async with lighthouse(bind=f"127.0.0.1:{port}") as second, worker(second.address) as member:
                if not member.welcome.services:
                    assert (await member.next(Services)).services == (TOLD,)
                await known(registrar)


async def test_the_next_lighthouse_is_asked_when_the_first_is_silent() -> None:
    async with lighthouse() as one:
        short = Registration("relay", "relay-1", RELAY.address, ttl=1.5)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
            async with registered([nobody, one.address], short) as registrar:
                await known(registrar)
                assert registrar.lighthouse == one.address


async def test_every_lighthouse_knows_the_services_and_the_next_leader_goes_on_with_them(etcd: EtcdCluster) -> None:
    url = f"{etcd.address}/{uuid.uuid4()}"
    short = Registration("relay", "relay-1", RELAY.address, ttl=6.0)
    async with (
        lighthouse(store=url) as first,
        lighthouse(store=url) as second,
        registered([second.address], short) as registrar,
    ):
        await known(registrar)
        assert registrar.lighthouse == first.address, "the one that leads took it"
        await eventually(lambda: second.registry.addresses() == (TOLD,))
        await first.stop()
        await eventually(lambda: second.term is not None)
        async with worker(second.address) as member:
            assert member.welcome.services == (TOLD,), "known before it registers again"
            await eventually(lambda: registrar.lighthouse == second.address)
            await member.ask(0)
            await member.next(Quorum)  # and no Services before it: it never was away


async def test_a_service_that_looks_for_another_finds_it_when_it_comes_and_forgets_it_when_it_goes() -> None:
    short = Registration("relay", "relay-1", RELAY.address, ttl=1.5)
    async with lighthouse() as one, registered([one.address], short, looks_for="metrics") as registrar:
        await known(registrar)
        assert registrar.found is None
        async with registered([one.address], Registration("metrics", "m", "http://m:1")):
            await eventually(lambda: registrar.found == "http://m:1")
        await eventually(lambda: registrar.found is None)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("text/html", "<h1>It works!</h1>"), ("application/json", "[]"), ("application/json", '{"services": [1]}')],
)
async def test_a_service_stays_registered_whatever_is_said_of_the_one_that_it_looks_for(
    kind: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    renewals: list[str] = []

    async def renewed(request: web.Request) -> web.Response:
        renewals.append(request.path)
        return web.json_response({})

    async def cluster(_: web.Request) -> web.Response:
        return web.Response(text=said, content_type=kind)

    routes = [Route("PUT", "/v1/services/{kind}/{name}", renewed, Access.OPEN)]
    routes += [Route("GET", "/v1/cluster", cluster, Access.OPEN)]
    short = Registration("relay", "relay-1", RELAY.address, ttl=0.3)
    async with (
        serving(Service("lighthouse", routes), "127.0.0.1", 0) as endpoint,
        registered([endpoint.url], short, looks_for="metrics") as registrar,
    ):
        await eventually(lambda: len(renewals) > 3)
        assert (registrar.lighthouse, registrar.found) == (endpoint.url, None)
    assert "not registered" not in caplog.text


TOKENS = Tokens(worker="worker-" * 3, service="service-" * 3, admin="admin-" * 4)


@asynccontextmanager
async def follower(leader: str) -> AsyncIterator[str]:
    """Return the answer of a lighthouse that does not lead."""

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": f"{leader}{request.path}"})

    route = Route("PUT", "/v1/services/{kind}/{name}", elsewhere, Access.SERVICE)
    async with serving(Service("follower", [route]), "127.0.0.1", 0, tokens=TOKENS) as endpoint:
        yield endpoint.url


async def test_a_lighthouse_that_does_not_lead_sends_the_service_to_the_one_that_does() -> None:
    async with lighthouse(tokens=TOKENS) as leader, follower(leader.address) as other:
        async with registered([other], RELAY, token=TOKENS.service) as registrar:
            await known(registrar)
            assert registrar.lighthouse == leader.address
            assert leader.registry.addresses() == (TOLD,)
        assert leader.registry.addresses() == ()


async def test_a_goodbye_that_comes_to_a_standby_goes_on_to_the_leader(etcd: EtcdCluster) -> None:
    mesh = {"store": f"{etcd.address}/{uuid.uuid4()}", "tokens": TOKENS}
    async with lighthouse(**mesh) as first, lighthouse(**mesh) as second:
        async with registered([first.address], replace(RELAY, ttl=600.0), token=TOKENS.service) as registrar:
            await known(registrar)
            assert registrar.lighthouse == first.address
            assert first.leadership is not None
            first.leadership.give_up("planted", stand_back=True)
            await eventually(lambda: second.term is not None)
            await eventually(lambda: first.leadership is not None and first.leadership.leader is not None)
            await eventually(lambda: second.registry.addresses() == (TOLD,))
            assert registrar.lighthouse == first.address, "it has not renewed yet"
        await eventually(lambda: second.registry.addresses() == ())


async def test_a_wrong_token_is_reported_and_retried() -> None:
    async with lighthouse(tokens=TOKENS) as one:
        async with registered([one.address], RELAY, token=TOKENS.worker) as registrar:
            await eventually(lambda: "a worker token may not do this" in (registrar.trouble or ""))
            assert not registrar.known.is_set()
        assert one.registry.records == ()
