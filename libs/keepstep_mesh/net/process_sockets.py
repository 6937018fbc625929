"""All sockets of this process, also those that other libraries opened."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator

Endpoint = tuple[str, int]
"""Numeric address and port."""


def process_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Each descriptor of a socket, with a duplicate of the socket that stays open until the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found = _duplicate(int(name))
        except OSError:  # not a socket, or closed in between
            continue
        with found:
            yield int(name), found


def _duplicate(descriptor: int) -> socket.socket:
    """Duplicate the descriptor of a socket, so that it cannot be closed and reused while it is inspected.

    Only sockets are duplicated: closing any descriptor of a file drops the POSIX locks of this process on it.

    :raises OSError: it is no socket.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def duplicate(descriptor: int, number: int) -> socket.socket:
    """Duplicate the descriptor of the socket with the inode ``number``.

    :raises OSError: it was closed since; another file may have the descriptor now.
    """
    copy = _duplicate(descriptor)
    if inode(copy) != number:
        copy.close()
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return copy


def is_tcp(found: socket.socket) -> bool:
    return found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM


def local_endpoint(found: socket.socket) -> Endpoint:
    """Of a TCP socket; port 0: it has none."""
    return _endpoint(found.getsockname())


def peer_endpoint(found: socket.socket) -> Endpoint | None:
    """Of a TCP socket; None: it listens, or is not connected."""
    try:
        return _endpoint(found.getpeername())
    except OSError:
        return None


def inode(found: socket.socket) -> int:
    """Return the kernel's number of a socket. All its descriptors share it; no other open socket has it."""
    return os.fstat(found.fileno()).st_ino


def _endpoint(address: tuple[str, int]) -> Endpoint:
    return address[0].partition("%")[0], address[1]
