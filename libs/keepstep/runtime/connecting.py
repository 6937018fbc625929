"""Connect a blocking socket so that another thread can end the wait."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from typing import Any

MAX_POLL_SECONDS = 1e6
"""``poll`` and sockets count milliseconds in 32 bits."""


def connect(sock: socket.socket, address: Any, seconds: float, check: Callable[[], None]) -> None:
    """Connect within ``seconds``, which are positive, and set the timeout of the socket to as many.

    A thread that interrupts it lets ``check`` raise, then calls ``shutdown`` of the socket. That call has no effect
    before the connection begins, so ``check`` is called after its beginning too.

    Raises:
        OSError: it is not connected. TimeoutError: the host did not answer. Any error of ``check``.
    """
    check()
    sock.setblocking(False)
    error = sock.connect_ex(address)
    check()
    if error == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        if not poll.poll(min(seconds, MAX_POLL_SECONDS) * 1000):
            raise TimeoutError("timed out")
        check()
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    sock.settimeout(min(seconds, MAX_POLL_SECONDS))
