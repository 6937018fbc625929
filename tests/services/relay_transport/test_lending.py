"""A joiner lends its chunks to few readers at a time; one that does not read delays the others only briefly."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from keepstep.transfer.direct.sending import http_server
from keepstep.transfer.direct.sending.http_server import CheckpointServer
from keepstep.transfer.peer_choice import PEERS_AT_ONCE
from keepstep_mesh.security.tokens import ClientToken

DEADLINE = 60.0
CHUNK = bytes(range(256)) * (32 << 12)
"""More than sockets hold."""
HERE, UNKNOWN = "00" * 16, "11" * 16


@pytest.fixture
def server() -> Iterator[CheckpointServer]:
    server = CheckpointServer("127.0.0.1", DEADLINE, ClientToken.of(None))
    server.serve_chunks(lambda digest: [memoryview(CHUNK)] if digest.hex() == HERE else None)
    yield server
    server.stop(wait=True)


@contextlib.contextmanager
def asking(server: CheckpointServer, digest: str = HERE) -> Iterator[tuple[int, socket.socket]]:
    """The status of the answer, which is read up to the end of its header."""
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as reader:
        reader.sendall(f"GET /chunk/{digest} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = reader.recv(1)
            assert byte, head
            head += byte
        yield int(head.split()[1]), reader


def rest(reader: socket.socket) -> bytes:
    with reader.makefile("rb") as file:
        return file.read(len(CHUNK))


def served_in_the_end(server: CheckpointServer) -> bool:
    """By asking again, as joiners do."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        with asking(server) as (status, reader):
            if status == 200:
                return rest(reader) == CHUNK
            assert status == 503
    return False


def test_a_joiner_beyond_the_limit_is_sent_elsewhere_and_served_later(server, monkeypatch):
    monkeypatch.setattr(http_server, "TURN_SECONDS", DEADLINE)
    with contextlib.ExitStack() as stack:
        served = [stack.enter_context(asking(server)) for _ in range(PEERS_AT_ONCE)]
        assert [status for status, _ in served] == [200] * PEERS_AT_ONCE
        with asking(server) as (status, _):
            assert status == 503
        assert rest(served[0][1]) == CHUNK
        assert served_in_the_end(server)


def test_readers_that_do_not_read_hold_up_nobody_for_long(server):
    with contextlib.ExitStack() as stack:
        for _ in range(PEERS_AT_ONCE):
            stack.enter_context(asking(server))
        assert served_in_the_end(server)


def test_a_chunk_that_is_not_here_is_said_to_be_unknown(server):
    with asking(server, UNKNOWN) as (status, _):
        assert status == 404
