"""A peer, relay or lighthouse that answers without end, or drop by drop, is cut off with a clear error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from aiohttp import web

from keepstep.group import group_peers
from keepstep.group.group_peers import checkpoint_metadata, first_layout_difference
from keepstep.rendezvous import store_client
from keepstep.rendezvous.key_value_server import RendezvousError
from keepstep.rendezvous.store_client import RendezvousStore
from keepstep_mesh.discovery.registration import Registration, registered
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net import http
from keepstep_mesh.net.http import (
    Problem,
    answer_of_leader,
    client_session,
    raise_for_problem,
    read_answer,
    read_json_answer,
)
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Service, serving
from keepstep_metrics.lighthouse import live_status
from tests.services.cli.scene import keepstep
from tests.support.network.hostile_server import KINDS, hostile
from tests.support.services.lighthouse_driver import eventually

SECONDS = {"endless": 1.5, "huge": 1.5, "drops": 0.4, "drops of a head": 0.4}
"""Time limit of each question: enough for the limits in bytes, and for some drops."""
MARGIN_SECONDS = 9.5
IN_FLIGHT_BYTES = 16 << 20
"""Bytes that socket buffers on both sides may hold beyond those that are read."""


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < MARGIN_SECONDS


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_that_is_asked_for_a_layout_or_a_checkpoint_is_cut_off(kind: str) -> None:
    with hostile(kind) as peer:
        with soon():
            why = (await first_layout_difference(peer.address, None, ["a"], timeout=SECONDS[kind]))[1]
        assert why.startswith("the difference is unknown")
        with soon(), pytest.raises((KeepstepError, TimeoutError)) as cut:
            await checkpoint_metadata(peer.address, 0, None, SECONDS[kind])
        if kind in ("endless", "huge"):
            assert f"(limit {group_peers.MAX_LAYOUT_BYTES} bytes)" in why
            assert f"(limit {group_peers.MAX_METADATA_BYTES} bytes)" in str(cut.value)
        else:
            assert "TimeoutError" in why
            assert "did not answer within 0.4 s" in str(cut.value)
        assert peer.sent < group_peers.MAX_LAYOUT_BYTES + 2 * IN_FLIGHT_BYTES


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rendezvous_host_is_cut_off(kind: str, status: int) -> None:
    with hostile(kind, "application/msgpack", status) as host:
        store = RendezvousStore(host.address, timeout=timedelta(seconds=SECONDS[kind]))
        with soon(), pytest.raises((RendezvousError, TimeoutError)) as cut:
            store.get("key")
        if kind in ("endless", "huge"):
            expected = f"(limit {store_client.MAX_ANSWER_BYTES} bytes)" if status == 200 else "refused (500)"
            assert expected in str(cut.value)
        else:
            assert "did not answer" in str(cut.value)
        assert host.sent < IN_FLIGHT_BYTES
        store.close()


def test_an_answer_that_is_no_msgpack_is_an_error_of_the_rendezvous_host() -> None:
    with _answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xc1") as host:
        store = RendezvousStore(host, timeout=timedelta(seconds=MARGIN_SECONDS))
        with pytest.raises(RendezvousError, match="not msgpack"):
            store.get("key")
        store.close()


@contextmanager
def _answering(answer: bytes) -> Iterator[str]:
    """Address of a server that says this to the first who asks."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.settimeout(MARGIN_SECONDS)
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


async def test_a_lighthouse_that_redirects_without_end_is_asked_twice() -> None:
    asked = []

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPTemporaryRedirect(request.path)

    route = Route("POST", "/order", elsewhere, Access.OPEN)
    async with serving(Service("lighthouse", [route]), "127.0.0.1", 0) as endpoint, client_session() as asking:
        with pytest.raises(Problem, match="no lighthouse leads yet"):
            async with answer_of_leader(asking, "POST", endpoint.url, "/order"):
                pass
    assert asked == ["/order", "/order"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_of_a_service_has_a_limit_and_a_deadline(kind: str) -> None:
    with hostile(kind) as service:
        for read in (read_answer, read_json_answer):
            with soon(), pytest.raises((Problem, TimeoutError)):
                async with client_session(timeout=SECONDS[kind]) as asking, asking.get(service.address) as answer:
                    await read(answer, 1 << 20)
        assert service.sent < (2 << 20) + 2 * IN_FLIGHT_BYTES


@pytest.mark.parametrize("kind", ["endless", "huge", "drops"])
async def test_the_reason_of_a_refusal_is_read_no_further_than_people_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PROBLEM_SECONDS", SECONDS[kind])
    with hostile(kind, status=500) as service:
        async with client_session(timeout=None) as asking, asking.get(service.address) as answer:
            with soon(), pytest.raises(Problem) as said:
                await raise_for_problem(answer)
        assert len(str(said.value)) <= 500
        assert service.sent < IN_FLIGHT_BYTES


@pytest.mark.parametrize("kind", KINDS)
async def test_a_relay_that_the_metrics_service_asks_is_cut_off(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_status, "RELAY_STATUS_SECONDS", SECONDS[kind])
    with hostile(kind) as relay:
        async with client_session() as asking:
            with soon():
                assert await live_status._uploads(asking, "relay-1", relay.address, "job", {}) == []


async def test_a_service_registers_with_a_lighthouse_whose_list_of_services_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hostile("endless") as known:
        async with registered([known.address], Registration("relay", "r", "http://a:1"), looks_for="metrics") as one:
            await eventually(lambda: sum(request.startswith(b"GET") for request in known.requests) > 0)
            assert one.found is None


ASKED: dict[str, Callable[[str], tuple[str, ...]]] = {
    "lighthouse": lambda address: ("status", "--lighthouse", address),
    "relay": lambda address: ("checkpoint", "ls", "--relay", address),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", ["endless", "huge"])
async def test_the_command_line_reads_no_answer_without_end(kind: str, asked: str) -> None:
    with hostile(kind) as server:
        said = await keepstep(*ASKED[asked](server.address))
        assert said.code != 0
        assert "too large (limit 67108864 bytes)" in said.err
        assert "Traceback" not in said.err
        assert server.sent < (64 << 20) + 2 * IN_FLIGHT_BYTES


async def test_the_command_line_follows_no_line_without_end() -> None:
    with hostile("endless", "text/event-stream") as server:
        said = await keepstep("events", "--follow", "--lighthouse", server.address)
        assert said.code != 0
        assert "too long (limit 16777216 bytes)" in said.err
        assert "Traceback" not in said.err
