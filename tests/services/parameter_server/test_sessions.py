"""Each client of a parameter server has a session of its own, and what one client does ends no other session."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import msgpack
import pytest
import torch

from keepstep import parameter_server
from keepstep.parameter_server import ParameterServer, SessionRefused
from keepstep.process_group import ProcessGroup, ProcessGroupError
from keepstep.process_group.baby.children import Spawner
from keepstep.process_group.torch_backends.gloo import FIRST_BARRIER
from keepstep.rendezvous.interruptible_store import UNKNOWN_VERSION
from keepstep.rendezvous.key_value_server import PATH
from keepstep.rendezvous.store_client import RendezvousStore, Table
from keepstep_mesh.errors import AuthError, KeepstepError
from keepstep_mesh.net.addresses import outward_address
from tests.services.parameter_server import doubling
from tests.services.parameter_server.doubling import SERVER, TAG, Doubling, doubled, send

DEADLINE = 60.0
SHORT = timedelta(seconds=1)
OLDER = FIRST_BARRIER - 1
"""Version of the rendezvous of builds whose sessions have no barrier, and tell no version."""


@pytest.fixture(scope="module", autouse=True)
def spawner() -> Iterator[None]:
    """Keep the spawner of sessions, whose start is slow, from test to test."""
    kept = Spawner.shared()
    kept.fork().discard()
    yield
    kept.release()


@pytest.fixture
def serve() -> Iterator[Callable[..., Doubling]]:
    """Starts servers, and shuts them down at the end."""
    servers: list[Doubling] = []

    def start(kind: type[Doubling] = Doubling, **settings: object) -> Doubling:
        servers.append(kind(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()


@contextmanager
def session(server: Doubling) -> Iterator[ProcessGroup]:
    pg = type(server).new_session(server.address())
    try:
        yield pg
    finally:
        pg.shutdown()


@contextmanager
def client_process(server: Doubling) -> Iterator[subprocess.Popen[str]]:
    """A client that has had one answer."""
    command = [sys.executable, str(Path(doubling.__file__)), server.address()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "2.0\n"
            yield client
        finally:
            client.send_signal(signal.SIGKILL)


def ended(server: Doubling) -> str:
    """Return the reason of the next session that ends; empty: its client was done."""
    return server.ended.get(timeout=DEADLINE)[1]


def test_clients_at_the_same_time_have_a_session_each(serve) -> None:
    server = serve()
    together = threading.Barrier(3)

    def use(number: int) -> list[float]:
        with session(server) as pg:
            together.wait(DEADLINE)
            answers = [doubled(pg, 100 * number + i) for i in range(1, 4)]
            send(pg, SERVER, 0)
            return answers

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        told = list(pool.map(use, range(3), timeout=DEADLINE))
    assert told == [[200 * number + 2 * i for i in range(1, 4)] for number in range(3)]
    ends = [server.ended.get(timeout=DEADLINE) for _ in range(3)]
    assert [reason for _, reason in ends] == ["", "", ""]
    assert len({session_id for session_id, _ in ends}) == 3


def test_a_client_that_is_killed_ends_its_session_only(serve) -> None:
    server = serve()
    with session(server) as other:
        with client_process(server) as client:
            client.kill()
        assert "ProcessGroupError: recv failed" in ended(server)
        assert doubled(other, 4) == 8


def test_a_client_that_freezes_ends_its_session_by_the_timeout_and_delays_no_other(serve, monkeypatch) -> None:
    server = serve()
    with client_process(server) as client:
        monkeypatch.setattr(Doubling, "timeout", SHORT)
        with client_process(server) as frozen:
            frozen.send_signal(signal.SIGSTOP)
            client.stdin.write("\n")
            client.stdin.flush()
            assert client.stdout.readline() == "2.0\n"
            assert ended(server).startswith("ProcessGroupTimeoutError: recv")
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "2.0\n"
    assert "recv failed" in ended(server)


def test_a_tensor_of_another_size_ends_its_session_only(serve) -> None:
    server = serve()
    with session(server) as other:
        hostile = Doubling.new_session(server.address())
        hostile.send([torch.ones(1000)], SERVER, TAG).wait()
        assert "ProcessGroupError" in ended(server)
        hostile.shutdown()
        assert doubled(other, 4) == 8


def post(server: Doubling, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request of a client that is not written with keepstep."""
    connection = http.client.HTTPConnection(urlsplit(server.address()).netloc, timeout=DEADLINE)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def session_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("keepstep-session")]


@pytest.mark.parametrize("address", [b"x", bytes(500_000)], ids=len)
def test_an_address_that_is_garbage_ends_its_session_only(serve, address, caplog) -> None:
    server = serve()
    with session(server) as other:
        others = session_threads()
        session_id = json.loads(post(server, "/new_session")[1])["session_id"]
        hostile = next(thread for thread in session_threads() if thread not in others)
        assert post(server, PATH, msgpack.packb([session_id, 0, 0, 0, "set", "0/1", address]))[0] == 200
        hostile.join(DEADLINE)
        assert not hostile.is_alive()
        assert "reason=ProcessGroupError: " in caplog.text
        assert doubled(other, 4) == 8


BODIES = [b"", b"\xc1", msgpack.packb("text"), msgpack.packb(["no session", 0, 0, 0, "set", "key", b"value"])]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_request_with_garbage_is_refused_and_ends_no_session(serve, body) -> None:
    server = serve()
    with session(server) as pg:
        assert post(server, PATH, body)[0] in (400, 410)
        address = urlsplit(server.address())
        with socket.create_connection((address.hostname, address.port)) as raw:
            raw.sendall(os.urandom(1000))
        assert doubled(pg, 4) == 8


def test_beyond_the_limit_a_client_is_refused_until_a_session_has_ended(serve) -> None:
    server = serve(max_sessions=1)
    with session(server) as pg:
        assert doubled(pg, 4) == 8
        with pytest.raises(SessionRefused, match=r"refused a session: too many sessions \(max_sessions=1\)"):
            Doubling.new_session(server.address())
        connection = http.client.HTTPConnection(urlsplit(server.address()).netloc, timeout=DEADLINE)
        connection.request("POST", "/new_session")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        connection.close()
    assert "recv failed" in ended(server)
    for thread in session_threads():
        thread.join(DEADLINE)
    with session(server) as pg:
        assert doubled(pg, 4) == 8


def test_a_client_that_never_connects_ends_its_session_by_the_timeout(serve, monkeypatch) -> None:
    monkeypatch.setattr(Doubling, "timeout", SHORT)
    server = serve(max_sessions=1)
    assert post(server, "/new_session")[0] == 200
    (thread,) = session_threads()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    with session(server) as pg:
        assert doubled(pg, 4) == 8


@pytest.mark.parametrize(("of_server", "of_client"), [(OLDER, UNKNOWN_VERSION), (UNKNOWN_VERSION, OLDER)])
def test_a_client_and_a_server_of_different_builds_meet(serve, monkeypatch, of_server, of_client) -> None:
    monkeypatch.setattr(parameter_server, "UNKNOWN_VERSION", of_server)
    server = serve()
    session_id = json.loads(post(server, "/new_session")[1])["session_id"]
    table = Table(session_id)
    store = RendezvousStore(f"http://{urlsplit(server.address()).netloc}", table, version=of_client)
    pg = Doubling.new_process_group()
    try:
        pg.configure("", "client", 1, 2, store=store)
        assert doubled(pg, 4) == 8
    finally:
        pg.shutdown()
        store.close()


class Failing(Doubling):
    """Fails before the client has connected."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        if threading.current_thread().name.startswith("keepstep-session"):
            raise OSError("no space")
        return super().new_process_group()


def test_a_client_whose_session_fails_at_the_server_learns_it_at_once(serve, caplog) -> None:
    server = serve(Failing)
    with pytest.raises(KeepstepError, match=r"session has ended|shutting down"):
        Failing.new_session(server.address())
    assert "OSError: no space" in caplog.text


class Foreign(Doubling):
    """Uses a process group of another library."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return "a process group"  # type: ignore[return-value]


def test_a_process_group_of_another_library_is_refused_by_name(serve) -> None:
    refused = pytest.raises(TypeError, match=r"Foreign\.new_process_group returned a str: expected a process group of")
    address = serve().address()
    with refused:
        Foreign.new_session(address)
    assert not session_threads()  # none waits for the client
    with refused:
        Foreign()


def test_a_server_may_run_its_sessions_in_its_own_process(serve) -> None:
    server = serve(isolate=False)
    with session(server) as pg:
        assert doubled(pg, 4) == 8
        server.shutdown()
    assert "the parameter server was shut down" in ended(server)


def test_the_shutdown_ends_sessions_in_every_state_and_leaves_nothing(serve) -> None:
    server = serve()
    with session(server) as pg:
        assert doubled(pg, 4) == 8  # else the server may still connect
        assert post(server, "/new_session")[0] == 200  # its client never connects
        server.shutdown()
        assert "the parameter server was shut down" in ended(server)
        assert not session_threads()
        with pytest.raises(ProcessGroupError):
            doubled(pg, 4)
        with pytest.raises(KeepstepError, match="cannot be reached"):
            Doubling.new_session(server.address())
    server.shutdown()


def test_a_listener_that_fails_to_close_keeps_no_session(serve, monkeypatch) -> None:
    server = serve()
    close = server._listener.close

    async def fail() -> None:
        await close()
        raise OSError("on purpose")

    with session(server) as pg:
        assert doubled(pg, 4) == 8
        monkeypatch.setattr(server._listener, "close", fail)
        with pytest.raises(OSError, match="on purpose"):
            server.shutdown()
        assert "the parameter server was shut down" in ended(server)
        assert not session_threads()


class Ending(Doubling):
    """A client of it can shut the server down."""

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        super().forward(session_id, pg)
        self.shutdown()


def test_a_session_may_shut_the_server_down(serve) -> None:
    server = serve(Ending)
    with session(server) as pg:
        send(pg, SERVER, 0)
        (thread,) = session_threads()
        thread.join(DEADLINE)
    with pytest.raises(KeepstepError, match="cannot be reached"):
        Ending.new_session(server.address())


def test_a_client_without_the_token_of_the_job_is_refused(serve, monkeypatch) -> None:
    monkeypatch.setenv("KEEPSTEP_TOKEN", "token-of-the-job")
    server = serve()
    with session(server) as pg:
        assert doubled(pg, 4) == 8
    monkeypatch.setenv("KEEPSTEP_TOKEN", "another-token-of-a-job")
    with pytest.raises(AuthError, match="wrong or missing token"):
        Doubling.new_session(server.address())


def test_other_machines_reach_a_server_only_with_a_token_or_by_its_hostname(serve, monkeypatch, caplog) -> None:
    assert serve(hostname=None).address().startswith("http://127.0.0.1:")
    assert serve(hostname=outward_address()).address().startswith(f"http://{outward_address()}:")
    assert ("anyone who can connect may begin a session" in caplog.text) == (outward_address() != "127.0.0.1")
    monkeypatch.setenv("KEEPSTEP_TOKEN", "token-of-the-job")
    assert serve(hostname=None).address().startswith(f"http://{outward_address()}:")


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"port": 65536}, "port=65536 must be in"), ({"port": 0, "max_sessions": 0}, "max_sessions=0 must be at least 1")],
)
def test_a_setting_out_of_range_is_refused(settings, error) -> None:
    with pytest.raises(ValueError, match=error):
        Doubling(**settings)


def test_a_token_that_cannot_be_read_is_refused_and_leaves_no_process(monkeypatch) -> None:
    monkeypatch.setenv("KEEPSTEP_TOKEN_FILE", "/missing")
    users = Spawner._shared._users
    with pytest.raises(AuthError, match="/missing"):
        Doubling()
    assert Spawner._shared._users == users


def test_a_port_in_use_is_refused_and_leaves_no_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        Doubling(taken.getsockname()[1])


def test_the_class_is_to_be_subclassed() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ParameterServer(0)  # type: ignore[abstract]
