"""Keeps the sockets of a trainer out of the processes that it forks, such as DataLoader workers.

A fork copies every descriptor, and a connection ends for its peer only when the last copy is closed: as long as a child
lives, no peer hears that its parent was killed. So a child replaces its copies of our sockets by ``/dev/null`` at once,
and sends nothing on them: a shutdown, or a TLS close_notify, would end the parent's connection too. It does not just
close them, because an object in Python or C++ that still holds the number may close it later, and must not close a
descriptor of the child's own. The event loop's own descriptors stay: they keep no connection open, and no thread of a
child runs that loop.

Our sockets are:

* those that ``open_socket`` and ``listening_socket`` opened, and those given to ``claim``;
* those accepted on a listening socket of ours: they have its address;
* those that a library opened within ``claim_opened``.

All other descriptors are the script's, and are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, Protocol

from keepstep_mesh.errors import ForkError
from keepstep_mesh.net.process_sockets import inode, is_tcp, local_endpoint, peer_endpoint, process_sockets

Found = Iterable[tuple[int, int]]
"""Descriptors of sockets with their inodes."""

_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104

_opening = threading.RLock()
"""Held while a socket is opened and claimed, and during a fork: no child inherits a socket between the two."""
_claimed: dict[int, int] = {}
"""Descriptor -> inode. The entry of a closed socket matches nothing; it stays until its descriptor is claimed again."""
_searches: set[Callable[[], Found]] = set()
"""Search function of each open ``claim_opened``."""
_owners: weakref.WeakValueDictionary[int, ForkAware] = weakref.WeakValueDictionary()
_order = itertools.count()


class ForkAware(Protocol):
    def forked(self) -> None:
        """Called in each forked child. Must not wait, nor take a lock: threads that hold one are not there."""


def open_socket(family: int, kind: int, protocol: int, made_by: type[socket.socket] = socket.socket) -> socket.socket:
    """A new socket of class ``made_by``, of which no forked child keeps a copy."""
    with _opening:
        opened = made_by(family, kind, protocol)
        claim(opened)
    return opened


def listening_socket(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Listens on the first address of ``host``. No forked child keeps a copy of it, nor of what it accepts."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with _opening:
        listener = socket.create_server(address[:2], family=family, backlog=backlog)
        claim(listener)
    return listener


def claim(ours: socket.socket) -> None:
    """Close ``ours``, and the connections that it accepts, in every child that is forked from now on."""
    _claimed[ours.fileno()] = inode(ours)


@contextlib.contextmanager
def claim_opened(search: Callable[[], Found]) -> Iterator[None]:
    """Claim the sockets that a library opens within the block, and hide them from programs that are executed.

    ``search`` finds them, in any thread and, when a fork comes before the end of the block, in the child. Sockets that
    it finds before the block are not claimed.
    """
    foreign = {number for _, number in search()}

    def opened() -> Found:
        return [(descriptor, number) for descriptor, number in search() if number not in foreign]

    _searches.add(opened)
    try:
        yield
    finally:
        try:
            with _opening:  # or a descriptor that was found, closed and claimed again would get its old inode back
                for descriptor, number in opened():
                    _claimed[descriptor] = number
                    with contextlib.suppress(OSError):  # closed in between
                        os.set_inheritable(descriptor, False)
        finally:
            _searches.discard(opened)


def sockets_at(port: int) -> list[tuple[int, int]]:
    """For ``claim_opened``: TCP sockets that listen on ``port``, and connections to it, of whatever host."""
    found = []
    for descriptor, one in process_sockets():
        if is_tcp(one):
            peer = peer_endpoint(one) or local_endpoint(one)
            if peer[1] == port:
                found.append((descriptor, inode(one)))
    return found


def tell_children(owner: ForkAware) -> None:
    """Has ``owner.forked()`` called in each forked child while ``owner`` lives; the newest owner is called first."""
    _owners[next(_order)] = owner


def never_free(*objects: object) -> None:
    """For a forked child: destructors that wait for a thread of the parent would wait for ever."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def fork_error(what: str, pid: int) -> ForkError:
    """Return the error for the use of a parent's object in a forked child.

    Args:
        what: name of the object in the error.
        pid: process that made the object.
    """
    return ForkError(
        f"{what} belongs to process {pid}; this is process {os.getpid()}, a forked child of it (such as a DataLoader "
        f"worker), which cannot use it: read the data before the fork, or create another object in the child"
    )


class OfParent:
    """Replaces, in a forked child, an object that only the parent may use. Any use raises ``ForkError``.

    Args:
        what, pid: see ``fork_error``.
    """

    def __init__(self, what: str, pid: int) -> None:
        object.__setattr__(self, "_error", lambda: fork_error(what, pid))

    def __getattr__(self, _name: str) -> NoReturn:
        raise self._error()

    def __setattr__(self, _name: str, _value: object) -> NoReturn:
        raise self._error()


def _before_fork() -> None:
    _opening.acquire()


def _after_fork_in_parent() -> None:
    _opening.release()


def _after_fork_in_child() -> None:
    """Take no lock: the thread that held it may not exist in this process."""
    global _opening
    _opening = threading.RLock()
    try:
        for _, owner in sorted(_owners.items(), reverse=True):
            owner.forked()
    finally:
        _replace(_copies())
        _claimed.clear()
        _searches.clear()


def _copies() -> list[int]:
    """Descriptors of this process's copies of our sockets."""
    ours = {*_claimed.values(), *(number for search in _searches for _, number in search())}
    others: list[tuple[int, int, str, int]] = []
    copies: list[int] = []
    listeners: set[tuple[int, str, int]] = set()
    for descriptor, found in process_sockets():
        if not is_tcp(found):
            continue
        host, port = local_endpoint(found)
        if inode(found) not in ours:
            others.append((descriptor, found.family, host, port))
            continue
        copies.append(descriptor)
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listeners.add((found.family, "" if host in _ANY_ADDRESS else host, port))
    accepted = (
        descriptor
        for descriptor, family, host, port in others
        if (family, host, port) in listeners or (family, "", port) in listeners
    )
    return [*copies, *accepted]


def _replace(copies: list[int]) -> None:
    if not copies:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in copies:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
