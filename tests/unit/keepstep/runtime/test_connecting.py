"""An interrupted connection ends at once, whatever moment the interruption hits."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

import pytest

from keepstep.connection import http_connection
from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint
from keepstep.rendezvous import store_client
from keepstep.rendezvous.key_value_server import Table
from keepstep.runtime.connecting import connect
from keepstep_mesh.net.fork_safety import open_socket
from tests.services.relay_transport.scene import switched_off

PATIENCE = 20.0
"""A wait that was not interrupted ends with another error after this time."""

moments = pytest.mark.parametrize("begun", [False, True], ids=["before-it-begins", "while-it-waits"])


class Interrupted(store_client._BoundedSocket):
    begun = False

    def interrupt(self) -> None:
        """Interrupt the call that this socket is for; each test sets it."""

    def connect_ex(self, address: Any) -> int:
        made = super().connect_ex(address) if self.begun else 0
        self.interrupt()
        return made or super().connect_ex(address)


@moments
def test_a_transfer_ends_that_connects_to_a_host_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(Interrupted, "begun", begun)
    monkeypatch.setattr(Interrupted, "interrupt", lambda _: one.interrupt())
    monkeypatch.setattr(http_connection, "open_socket", lambda *how: open_socket(*how, Interrupted))
    with switched_off() as address:
        one = Connection(Endpoint.of(address, dict), Deadline(PATIENCE, "no answer"), PATIENCE)
        with pytest.raises(BrokenConnection, match="interrupted"):
            one.connect()
        one.close()


@moments
def test_a_rendezvous_ends_that_connects_to_a_host_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(Interrupted, "begun", begun)
    monkeypatch.setattr(Interrupted, "interrupt", lambda _: one.abort("r2 was lost"))
    monkeypatch.setattr(store_client, "_BoundedSocket", Interrupted)
    with switched_off() as address:
        one = store_client._RemoteTable(address, Table(), None)
        with pytest.raises(store_client.RendezvousAbortedError, match="r2 was lost"):
            one.call("get", ("key",), time.monotonic() + PATIENCE)
        one.close()


def test_a_timeout_may_be_a_year() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sock:
        connect(sock, server.getsockname(), 365 * 86400.0, lambda: None)
        assert sock.getpeername() == server.getsockname()


def test_the_tls_handshake_has_the_time_that_the_connection_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [PATIENCE, PATIENCE, 0.2]
    deadline = Deadline(PATIENCE, "no answer")
    monkeypatch.setattr(deadline, "remaining", lambda: left.pop(0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint.of(f"https://127.0.0.1:{silent.getsockname()[1]}", dict, ssl.create_default_context)
        one = Connection(endpoint, deadline, PATIENCE)
        with pytest.raises(BrokenConnection, match="timed out"):
            one.connect()
        one.close()
    assert not left
