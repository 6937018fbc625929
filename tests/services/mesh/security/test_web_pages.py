"""A web page that is open on this machine gets nothing of servers without tokens, whatever its name resolves to."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import aiohttp
import pytest

from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.session.session_settings import SessionSettings
from keepstep.transfer.direct.sending.http_server import CheckpointServer
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.net.http import client_session
from keepstep_mesh.security.tokens import ClientToken, Tokens
from keepstep_mesh.testing import ChaosProxy
from tests.support.services.asking_group import Group
from tests.support.services.lighthouse_driver import lighthouse
from tests.support.services.metrics_driver import metrics
from tests.support.services.relay_driver import relay

EVIL = {"Host": "evil.example:29510"}
SERVICES: dict[str, Callable[..., Any]] = {"lighthouse": lighthouse, "relay": relay, "metrics": metrics}
UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


@contextlib.asynccontextmanager
async def group_server(token: str | None = None) -> AsyncIterator[GroupServer]:
    """Rank 0's server of a group, in no session."""
    session = SessionSettings(("http://127.0.0.1:1",), "job", "r0:1", token)
    one = GroupServer(GroupSettings(2, "127.0.0.1", 0), session, lambda _: None, lambda _: None)
    await one.start(connect=False)
    try:
        yield one
    finally:
        await one.close()


async def asked(http: aiohttp.ClientSession, url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Status and reason."""
    async with http.request(method, url, headers=headers, allow_redirects=False) as answer:
        text = await answer.content.read(4096)
        is_problem = answer.content_type == "application/problem+json" and method != "HEAD"
        return answer.status, json.loads(text)["detail"] if is_problem else ""


@pytest.mark.parametrize("kind", SERVICES)
async def test_every_route_of_a_service_refuses_the_host_of_a_page_elsewhere(kind: str) -> None:
    async with SERVICES[kind]() as one, client_session() as http:
        for route in one.service().routes:
            path = re.sub(r"\{[^}]*\}", "x", route.path)
            status, reason = await asked(http, one.address + path, route.method, **EVIL)
            assert status == HTTPStatus.MISDIRECTED_REQUEST, (route.method, path)
            assert route.method == "HEAD" or "allow it with --allow-host" in reason
        status, _ = await asked(http, f"{one.address}/v1/jobs", **EVIL, **{"X-Forwarded-Host": "localhost"})
        assert status == HTTPStatus.MISDIRECTED_REQUEST or kind == "relay"


@pytest.mark.parametrize("kind", SERVICES)
async def test_a_service_is_reached_by_any_loopback_name_and_through_a_forwarded_port(kind: str) -> None:
    async with SERVICES[kind]() as one, ChaosProxy.before(one.address) as forwarded, client_session() as http:
        for host in ("localhost:8080", "127.0.0.1", "[::1]:29530", "127.9.9.9:1"):
            assert (await asked(http, f"{one.address}/metrics", Host=host))[0] == 200
        assert (await asked(http, f"{forwarded.url.replace('127.0.0.1', 'localhost')}/metrics"))[0] == 200


@pytest.mark.parametrize("kind", SERVICES)
async def test_an_allowed_name_and_the_advertised_one_are_answered(kind: str) -> None:
    settings = {"allow_host": ("lab.example",), "advertise": "https://door.example:443"}
    async with SERVICES[kind](**settings) as one, client_session() as http:
        for host in ("lab.example", "door.example:443"):
            assert (await asked(http, f"{one.address}/metrics", Host=host, Origin=f"https://{host}"))[0] == 200
        assert (await asked(http, f"{one.address}/metrics", Host="x.lab.example"))[0] == HTTPStatus.MISDIRECTED_REQUEST


async def test_with_tokens_any_name_will_do() -> None:
    async with lighthouse(tokens=Tokens(worker="w" * 16)) as one, client_session("w" * 16) as http:
        assert (await asked(http, f"{one.address}/v1/jobs", **EVIL))[0] == 200


async def test_a_page_opens_no_session_and_follows_no_stream() -> None:
    async with lighthouse() as known, metrics() as told, client_session() as http:
        for url in (f"{known.address}/v1/jobs/job/session", f"{known.address}/v1/lighthouses/session"):
            assert (await asked(http, url, **EVIL, **UPGRADE))[0] == HTTPStatus.MISDIRECTED_REQUEST
        url = f"{known.address}/v1/jobs/job/events?follow=1"
        assert (await asked(http, url, **EVIL))[0] == HTTPStatus.MISDIRECTED_REQUEST
        assert (await asked(http, f"{told.address}/v1/stream?job=job", **EVIL))[0] == HTTPStatus.MISDIRECTED_REQUEST


async def test_a_group_that_names_the_lighthouse_otherwise_is_told_what_to_do_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lighthouse() as one:
        port = one.address.rpartition(":")[2]
        monkeypatch.setattr("socket.getaddrinfo", _resolving(port))
        with pytest.raises(ProtocolError, match=r"refusing a request to host 'gpu-7:.*allow it with --allow-host"):
            async with Group(f"http://gpu-7:{port}"):
                pass


def _resolving(port: str) -> Callable[..., Any]:
    """``gpu-7`` resolves to this machine, as a line of /etc/hosts has it."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **how: Any) -> Any:
        return real("127.0.0.1" if host == "gpu-7" else host, *args, **how)

    return resolve


async def test_the_servers_of_a_trainer_refuse_pages_too() -> None:
    checkpoints = CheckpointServer("127.0.0.1", 10.0, ClientToken.of(None))
    try:
        async with group_server() as group, client_session() as http:
            at = f"http://127.0.0.1:{checkpoints.port}"
            paths = ("/healthz", "/v1/ranks", "/v1/ranks/0/checkpoint", "/v1/layout", "/v1/rendezvous", "/nothing")
            for url in (*(group.address + path for path in paths), f"{at}/checkpoint/1", f"{at}/chunk/00"):
                assert (await asked(http, url, **EVIL))[0] == HTTPStatus.MISDIRECTED_REQUEST, url
                assert (await asked(http, url, Origin="https://evil.example"))[0] == HTTPStatus.FORBIDDEN, url
                assert (await asked(http, url, Host="localhost:1"))[0] not in (403, 421), url
            assert (await asked(http, f"{group.address}/v1/ranks", **EVIL, **UPGRADE))[0] == 421
            assert (await asked(http, f"{group.address}/v1/rendezvous", "POST", **EVIL))[0] == 421
    finally:
        checkpoints.stop(wait=True)


async def test_a_trainer_with_a_token_asks_for_that() -> None:
    async with group_server("a-token-of-the-job") as group, client_session() as http:
        assert (await asked(http, f"{group.address}/v1/layout", **EVIL))[0] == 401
