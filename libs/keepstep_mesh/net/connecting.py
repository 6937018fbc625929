"""Connect a blocking socket so that another thread can end the wait."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from typing import Any


def connect(connecting: socket.socket, address: Any, seconds: float, check: Callable[[], None]) -> None:
    """Connect, and set the timeout of the socket to ``seconds``.

    A thread that interrupts it lets ``check`` raise, then calls ``shutdown`` of the socket. That call has no effect
    before the connection begins, so ``check`` is called after its beginning too.

    Raises:
        OSError: it is not connected. TimeoutError: the host did not answer. Any error of ``check``.
    """
    check()
    connecting.setblocking(False)
    error = connecting.connect_ex(address)
    check()
    if error == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(connecting, select.POLLOUT)
        if not poll.poll(seconds * 1000):
            raise TimeoutError("timed out")
        check()
        error = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    connecting.settimeout(seconds)
