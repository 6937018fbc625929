"""A joiner lends its chunks to one reader after the other; one that does not read holds up nobody for long."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from keepstep.checkpointing import http_server
from keepstep.checkpointing.http_server import CheckpointServer
from keepstep_mesh.auth import ClientToken

DEADLINE = 60.0
CHUNK = bytes(range(256)) * (32 << 12)
"""More than sockets hold."""
HERE, UNKNOWN = "00" * 16, "11" * 16


@pytest.fixture
def server() -> Iterator[CheckpointServer]:
    server = CheckpointServer("127.0.0.1", DEADLINE, ClientToken.of(None))
    server.lend(lambda digest: [memoryview(CHUNK)] if digest.hex() == HERE else None)
    yield server
    server.stop(wait=True)


@contextlib.contextmanager
def asked(server: CheckpointServer, digest: str = HERE) -> Iterator[socket.socket]:
    """Its answer is read up to the end of the header."""
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as reader:
        reader.sendall(f"GET /chunk/{digest} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = reader.recv(1)
            assert byte, head
            head += byte
        assert head.startswith(b"HTTP/1.1 200" if digest == HERE else b"HTTP/1.1 404")
        yield reader


def rest(reader: socket.socket) -> bytes:
    with reader.makefile("rb") as file:
        return file.read(len(CHUNK))


def test_the_second_reader_gets_nothing_before_the_first_has_all(server, monkeypatch):
    monkeypatch.setattr(http_server, "TURN_SECONDS", DEADLINE)
    with asked(server) as first, asked(server) as second:
        with asked(server, UNKNOWN):
            pass  # so the server's one thread has sent the second whatever it sends now
        assert not select.select([second], [], [], 0)[0]
        assert rest(first) == CHUNK
        assert rest(second) == CHUNK


def test_a_reader_that_does_not_read_is_not_waited_for(server):
    with asked(server), asked(server) as second, asked(server) as third:
        assert rest(second) == CHUNK
        assert rest(third) == CHUNK
