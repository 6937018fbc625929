"""The port of a dead process refuses connections, that of a living one never does: real processes and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.session.session_settings import SessionSettings
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.jobs import port_probes
from keepstep_lighthouse.jobs.port_probes import PortProbes, refuses, serves
from keepstep_lighthouse.quorum.events import FindPort, PortRefused, ProbePort
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.messages import MemberLost
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.testing import DEADLINE
from tests.support.network.namespaces import Namespaces, why_not
from tests.support.services.asking_group import Group
from tests.support.services.command import killed_at_the_end
from tests.support.services.lighthouse_driver import eventually, lighthouse

PATIENT = Policy(min_replicas=1, reconnect_grace=DEADLINE, heartbeat_timeout=2 * DEADLINE)
"""Only a closed port ends the wait for a suspect soon."""
LIVING, CLOSINGS = 5, 12


def ask(step: int) -> RankAsk:
    return RankAsk(1, step, f"state {step}", shrink_only=False, commit_failures=0, timeout_ms=60_000)


@asynccontextmanager
async def group(address: str, replica_id: str, token: str | None = None) -> AsyncIterator[GroupServer]:
    settings = SessionSettings((address,), "job", replica_id, token, DEADLINE)
    server = GroupServer(GroupSettings(1, "127.0.0.1", 0), settings, lambda _: None, lambda _: None)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def has_answered(one: Lighthouse, *replica_ids: str) -> bool:
    groups = one.jobs["job"].core._groups.by_id
    return all((port := groups[name].port) is not None and port.answered for name in replica_ids)


async def test_a_killed_group_is_lost_as_soon_as_its_port_refuses() -> None:
    async with lighthouse(policy=PATIENT) as one, Group(one.address, name="a") as survivor:
        program = str(Path(__file__).with_name("group_process.py"))
        process = await asyncio.create_subprocess_exec(sys.executable, program, one.address, "b:1")
        try:
            await eventually(lambda: "b:1" in {session.replica_id for session in one.sessions.values()})
            await survivor.ask(0)
            await eventually(lambda: has_answered(one, "b:1"))
            process.send_signal(signal.SIGKILL)
            lost = await survivor.push_of(MemberLost)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        assert (lost.replica_id, lost.reason) == ("b:1", "its connection ended and its port is closed")
        (gone,) = [view for view in one.jobs["job"].core.replicas(0.0) if view.replica_id == "b:1"]
        assert gone.reason is not None
        assert "its port is closed" in gone.reason.sentence


async def test_no_closed_session_of_a_living_group_is_taken_for_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make faults`` closes a thousand."""
    refusals: list[bool] = []

    async def noted(host: str, port: int) -> bool:
        refusals.append(await refuses(host, port))
        return refusals[-1]

    monkeypatch.setattr(port_probes, "refuses", noted)
    names = [f"r{number}:1" for number in range(LIVING)]
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(lighthouse(policy=PATIENT))
        groups = [await stack.enter_async_context(group(one.address, name)) for name in names]
        for step in range(CLOSINGS):
            await asyncio.gather(*(server.ask(ask(step)) for server in groups))
            await eventually(lambda: has_answered(one, *names))
            closed = dict(one.sessions)
            for session in closed.values():
                session.link.abort("closed by the test")
            await eventually(lambda: len(one.sessions.keys() - closed.keys()) == LIVING)  # noqa: B023 - awaited here
        assert len(refusals) >= LIVING * CLOSINGS, "each closed session was followed by a probe"
        assert not any(refusals)
        kinds = {event.kind for event in one.events.after("job", 0, 10_000)}
        assert "suspect" in kinds
        assert "lost" not in kinds


@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
async def test_a_network_that_lets_nothing_through_does_not_refuse() -> None:
    """Groups on hosts of their own, whose sessions end: one port is filtered, one is unreachable, one host vanishes."""
    looked, refused = set[str](), set[str]()

    async def noted(host: str, port: int) -> bool:
        looked.add(host)
        if found := await refuses(host, port):
            refused.add(host)
        return found

    program = str(Path(__file__).with_name("group_process.py"))
    async with contextlib.AsyncExitStack() as stack:
        network = stack.enter_context(Namespaces())
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(port_probes, "refuses", noted)
        hosts = {name: network.host(name) for name in ("dropped", "unreachable", "vanished", "killed")}
        one = await stack.enter_async_context(
            lighthouse(bind=f"{network.own_address}:0", policy=PATIENT, insecure=True)
        )
        processes = {}
        for name, host in hosts.items():
            command = (*host.command, sys.executable, program, one.address, f"{name}:1", host.address)
            processes[name] = await stack.enter_async_context(killed_at_the_end(*command))
        names = [f"{name}:1" for name in hosts]
        await eventually(lambda: "job" in one.jobs and set(names) <= one.jobs["job"].core._groups.by_id.keys())
        await eventually(lambda: has_answered(one, *names))
        ports = {name: one.jobs["job"].core._groups.by_id[f"{name}:1"].port.number for name in hosts}
        network.filter("dropped", ports["dropped"], "blackhole")
        network.filter("unreachable", ports["unreachable"], "unreachable")
        network.unplug("vanished")
        processes["killed"].kill()
        async with asyncio.timeout(DEADLINE):  # a busy machine takes longer to close its port than the probes last
            await processes["killed"].wait()
        for session in list(one.sessions.values()):
            session.link.abort("closed by the test")
        await eventually(lambda: bool(refused) and len(looked) == len(hosts))
        await eventually(lambda: {"dropped:1", "unreachable:1"} <= {s.replica_id for s in one.sessions.values()})
        await one.ports.close()
        assert refused == {hosts["killed"].address}
        events = one.events.after("job", 0, 10_000)
        assert [event.replica_id for event in events if event.kind == "lost"] == ["killed:1"]


async def test_only_the_incarnation_itself_counts_as_an_answer() -> None:
    async with lighthouse() as one, group(one.address, "a:1", token=None) as server:
        host, port = "127.0.0.1", int(server.address.rpartition(":")[2])
        assert await serves(host, port, "a:1")
        assert not await serves(host, port, "a:2")
    assert not await serves(host, port, "a:1"), "it is closed"
    assert await refuses(host, port)


async def test_a_server_that_asks_for_a_token_answers_without_one() -> None:
    token = "keepstep-worker-" + "t" * 32
    server = GroupServer(
        GroupSettings(1, "127.0.0.1", 0),
        SessionSettings(("http://127.0.0.1:9",), "job", "a:1", token),
        lambda _: None,
        lambda _: None,
    )
    await server.start(connect=False)
    try:
        assert await serves("127.0.0.1", int(server.address.rpartition(":")[2]), "a:1")
    finally:
        await server.close()


@pytest.mark.parametrize("body", [b"{", b"[]", b"[" * 3000, b'{"replica_id": "a:1"}' + b" " * 5000])
async def test_another_answer_than_that_of_a_group_server_is_none(body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/healthz", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert not await serves("127.0.0.1", runner.addresses[0][1], "a:1")
    finally:
        await runner.cleanup()


async def test_a_port_that_resets_or_is_unreachable_does_not_refuse() -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    async with server:
        assert not await refuses("127.0.0.1", server.sockets[0].getsockname()[1])
    assert not await refuses("255.255.255.255", 9), "unreachable"


async def test_a_probe_goes_on_until_the_port_of_a_dying_process_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[object] = []
    probes = PortProbes()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        async def close_after_the_second(host: str, port: int) -> bool:
            attempts.append(await refuses(host, port))
            if len(attempts) == 2:
                listener.close()
            return attempts[-1]

        attempts: list[bool] = []
        monkeypatch.setattr(port_probes, "refuses", close_after_the_second)
        probes.probe(ProbePort(1, "a:1", "127.0.0.1", port, DEADLINE), reports.append)
        await eventually(lambda: bool(reports))
    assert attempts == [False, False, True]
    assert reports == [PortRefused(1, "a:1")]
    await probes.close()


async def test_a_port_that_does_not_answer_is_given_up_within_the_grace() -> None:
    reports: list[object] = []
    probes = PortProbes()
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):  # no room for another connection
            probes.probe(ProbePort(1, "a:1", *full.getsockname(), 0.1), reports.append)
            probes.probe(ProbePort(2, "b:1", *full.getsockname(), DEADLINE), reports.append)
            await eventually(lambda: len(probes._looks) == 1)
            await probes.close()
    assert not probes._looks
    assert reports == []


async def test_the_number_of_looks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_probes, "MAX_LOOKS", 1)
    probes = PortProbes()
    for _ in range(2):
        probes.find(FindPort(1, "a:1", "127.0.0.1", 9), lambda _: None)
        probes.probe(ProbePort(1, "a:1", "127.0.0.1", 9, DEADLINE), lambda _: None)
    assert len(probes._looks) == 1
    await probes.close()
