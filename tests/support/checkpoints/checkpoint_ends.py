"""Both ends of a checkpoint transfer: a peer process, a reader that stops on request, a proxy that alters bytes."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

from keepstep.checkpointing import HTTPTransport
from tests.support.checkpoints.checkpoint_peer import state_of

PEER = Path(__file__).with_name("checkpoint_peer.py")
MIB = 1 << 20


@contextlib.contextmanager
def peer(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start ``checkpoint_peer.py`` with these arguments; kill it at the end."""
    command = [sys.executable, str(PEER), *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def weights(state: Any) -> torch.Tensor:
    tensor: torch.Tensor = state["user"]["model"]["weights"]
    return tensor


def same(one: Any, other: Any) -> bool:
    return (
        weights(one).equal(weights(other))
        and one["user"]["model"]["bias"].equal(other["user"]["model"]["bias"])
        and bool(one["manager"] == other["manager"])
    )


def blank(mib: int) -> dict[str, object]:
    """A state of ``mib`` MiB to receive into."""
    state = state_of(0, mib)
    weights(state).zero_()
    return state


def address(transport: HTTPTransport[Any]) -> tuple[str, int]:
    host, port = transport.metadata().removeprefix("http://").split(":")
    return host, int(port)


class RawReader:
    """A reader of a checkpoint that receives bytes only when the test asks for them."""

    lease: str

    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self.connection = socket.create_connection(address(transport), timeout=60)

    def open(self, step: int) -> None:
        fields, _ = self.ask(f"GET /checkpoint/{step}?wait=30")
        self.lease = _found(r"Keepstep-Lease: (\S+)", fields)

    def head(self) -> str:
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            part = self.connection.recv(1)
            assert part, "closed"
            received += part
        return received.decode()

    def ask(self, line: str, *fields: str) -> tuple[str, bytes]:
        self.connection.sendall("\r\n".join([f"{line} HTTP/1.1", *fields, "", ""]).encode())
        head = self.head()
        return head, self.take(int(_found(r"Content-Length: (\d+)", head)))

    def begin(self, step: int, length: int) -> None:
        self.open(step)
        self.connection.sendall(f"GET /lease/{self.lease} HTTP/1.1\r\nRange: bytes=0-{length - 1}\r\n\r\n".encode())
        assert " 206 " in self.head()

    def take(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            part = self.connection.recv(min(length - len(received), 1 << 20))
            assert part, f"closed after {len(received)} of {length} bytes"
            received += part
        return bytes(received)

    def close(self) -> None:
        self.connection.close()


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


class Proxy:
    """Forward connections to ``target``.

    ``change(connection number, bytes so far, data)`` returns the bytes that the client receives in place of ``data``.
    None closes the connection.
    """

    def __init__(self, target: tuple[str, int], change: Callable[[int, int, bytes], bytes | None]) -> None:
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = self.passed = 0
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(self._target)
                self._sockets.append(server)
                self.connections += 1
                for function in (self._up, self._down):
                    self._threads.append(threading.Thread(target=function, args=(client, server, self.connections)))
                    self._threads[-1].start()

    def _up(self, client: socket.socket, server: socket.socket, _number: int) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, client: socket.socket, server: socket.socket, number: int) -> None:
        so_far = 0
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                changed = self._change(number, so_far, data)
                if changed is None:
                    break
                so_far += len(data)
                self.passed += len(data)
                client.sendall(changed)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition that no event announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        time.sleep(0.02)  # a condition of the process itself: no event announces it
