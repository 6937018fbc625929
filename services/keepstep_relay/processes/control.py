"""The socket between the main process of a relay and another one. A message may carry an open socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from enum import Enum

MAX_MESSAGE_BYTES = 64 << 10


class Message(Enum):
    """Those before ``READY`` come from the main process, the others go to it. The socket ends with the process."""

    SETTINGS = b"s"
    """The first message. JSON follows."""
    CLIENT = b"c"
    """Serve this connection of a client."""
    CERTIFICATES = b"t"
    """The files of certificates have changed."""
    PING = b"p"
    STOP = b"q"
    """Finish the open requests and end."""
    READY = b"R"
    REQUESTS = b"r"
    """This socket will bring HTTP requests of clients."""
    CLOSED = b"x"
    """A connection of a client ended."""
    PONG = b"P"


class Control:
    """One end, a Unix socket that keeps the borders of messages. Closes ``end`` itself."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)

    def send(self, message: Message, content: bytes = b"", passed: socket.socket | None = None) -> bool:
        """Send without waiting. Return False if the other side is gone or reads nothing."""
        try:
            if passed is None:
                self._end.send(message.value + content)
            else:
                socket.send_fds(self._end, [message.value + content], [passed.fileno()])
        except OSError:
            return False
        return True

    def listen(self, on_message: Callable[[Message, socket.socket | None], None], on_end: Callable[[], None]) -> None:
        """Call ``on_message`` for each message, and ``on_end`` when the other side is gone."""
        asyncio.get_running_loop().add_reader(self._end.fileno(), self._read, on_message, on_end)

    def _read(self, on_message: Callable[[Message, socket.socket | None], None], on_end: Callable[[], None]) -> None:
        try:
            content, passed, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            content, passed = b"", []
        if content:
            on_message(Message(content[:1]), socket.socket(fileno=passed[0]) if passed else None)
        else:
            self.close()
            on_end()

    def close(self) -> None:
        if self._end.fileno() >= 0:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._end.fileno())
            self._end.close()
