"""What stands at the ends of a checkpoint transfer in tests, and between them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support.checkpoints.checkpoint_peer import state_of

PEER = Path(__file__).with_name("checkpoint_peer.py")
MIB = 1 << 20


@contextlib.contextmanager
def peer(*arguments):
    command = [sys.executable, str(PEER), *map(str, arguments)]
    path = [str(PEER.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def weights(state):
    return state["user"]["model"]["weights"]


def same(one, other):
    return (
        weights(one).equal(weights(other))
        and one["user"]["model"]["bias"].equal(other["user"]["model"]["bias"])
        and one["manager"] == other["manager"]
    )


def blank(mib):
    state = state_of(0, mib)
    weights(state).zero_()
    return state


def address(transport):
    host, port = transport.metadata().removeprefix("http://").split(":")
    return host, int(port)


class RawReader:
    """A reader that takes its bytes when the test says so."""

    def __init__(self, transport):
        self.connection = socket.create_connection(address(transport), timeout=60)

    def open(self, step):
        fields, _ = self.ask(f"GET /checkpoint/{step}?wait=30")
        self.lease = re.search(r"Keepstep-Lease: (\S+)", fields)[1]

    def head(self):
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            part = self.connection.recv(1)
            assert part, "closed"
            received += part
        return received.decode()

    def ask(self, line, *fields):
        self.connection.sendall("\r\n".join([f"{line} HTTP/1.1", *fields, "", ""]).encode())
        head = self.head()
        return head, self.take(int(re.search(r"Content-Length: (\d+)", head)[1]))

    def begin(self, step, length):
        self.open(step)
        self.connection.sendall(f"GET /lease/{self.lease} HTTP/1.1\r\nRange: bytes=0-{length - 1}\r\n\r\n".encode())
        assert " 206 " in self.head()

    def take(self, length):
        received = bytearray()
        while len(received) < length:
            part = self.connection.recv(min(length - len(received), 1 << 20))
            assert part, f"closed after {len(received)} of {length} bytes"
            received += part
        return bytes(received)

    def close(self):
        self.connection.close()


class Proxy:
    """Passes connections on to ``target``.

    ``change(number of the connection, bytes so far, data)`` gives what the client gets of what the server sends; None:
    the connection is broken off.
    """

    def __init__(self, target, change):
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = self.passed = 0
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(self._target)
                self._sockets.append(server)
                self.connections += 1
                for function, arguments in ((self._up, ()), (self._down, (self.connections,))):
                    self._threads.append(threading.Thread(target=function, args=(client, server, *arguments)))
                    self._threads[-1].start()

    def _up(self, client, server):
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, client, server, number):
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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def eventually(condition, seconds=30.0):
    """For what nothing tells."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)  # a condition of the process itself, of which nothing tells
