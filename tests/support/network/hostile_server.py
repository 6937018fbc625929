"""An HTTP server whose response bodies never end, are far too large, or arrive byte by byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

PIECE = b" " * 65536
KINDS = ("endless", "huge", "drops", "drops of a head")
DROP_SECONDS = 0.02


class HostileServer:
    """``sent``: bytes of bodies that clients received. ``requests``: the heads of all requests."""

    def __init__(self, kind: str, content_type: str = "application/json", status: int = 200) -> None:
        length = {"endless": "Transfer-Encoding: chunked", "huge": f"Content-Length: {1 << 30}"}
        ending = length.get(kind, "Content-Length: 1000")
        self._head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n{ending}\r\n\r\n".encode()
        self._kind = kind
        self.sent = 0
        self.requests: list[bytes] = []
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                self._listener.settimeout(0.1)
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._answer, args=(connection,)))
                self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            self.requests.append(connection.recv(1 << 16))
            if self._kind == "drops of a head":
                self._drop(connection, self._head + b"x" * 1000)
                return
            connection.sendall(self._head)
            if self._kind == "drops":
                self._drop(connection, b"x" * 1000)
            while not self._over.is_set():
                framed = b"%x\r\n%s\r\n" % (len(PIECE), PIECE) if self._kind == "endless" else PIECE
                connection.sendall(framed)
                self.sent += len(PIECE)

    def _drop(self, connection: socket.socket, data: bytes) -> None:
        for byte in data:
            if self._over.wait(DROP_SECONDS):
                return
            connection.sendall(bytes([byte]))

    def close(self) -> None:
        self._over.set()
        for one in self._threads:
            one.join()
        self._listener.close()


@contextlib.contextmanager
def hostile(kind: str, content_type: str = "application/json", status: int = 200) -> Iterator[HostileServer]:
    server = HostileServer(kind, content_type, status)
    try:
        yield server
    finally:
        server.close()
