"""Find the sockets of one Gloo context by the addresses that its ranks published, and shut them down.

torch's ``abort`` does not end a Gloo operation in flight; shutting down its connections ends it within a millisecond.
An accepted connection has the address of the own listener as its local address. An outgoing connection has a peer's
listener as its remote address. The listening socket is never shut down: Gloo ends the process if accepting fails.

Several ranks of a group may be in one process, as threads. Then their outgoing connections have the same remote
address. Each Gloo context waits for its sockets with an epoll instance of its own, which tells them apart.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from keepstep_mesh.net.fork_safety import claim
from keepstep_mesh.net.process_sockets import (
    Endpoint,
    duplicate,
    inode,
    is_tcp,
    local_endpoint,
    peer_endpoint,
    process_sockets,
)

_LENGTH = struct.Struct("=Q")
_SEQUENCE = struct.Struct("=q")
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")
_SYN_SENT = "02"
_POLLED = re.compile(r"^tfd:.* ino:([0-9a-f]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GlooRank:
    """The published address of a rank, and the number by which each peer identifies itself when it connects."""

    listener: Endpoint
    sequence_numbers: tuple[int, ...]

    @classmethod
    def parse(cls, published: bytes) -> GlooRank:
        """Parse the bytes that Gloo stores for a rank.

        They are the host name and the ``sockaddr_storage``, each after its length, then a number for each rank.

        Raises:
            ValueError: ``published`` has another format.
        """
        try:
            (name_size,) = _LENGTH.unpack_from(published)
            start = _LENGTH.size + name_size
            (address_size,) = _LENGTH.unpack_from(published, start)
            (address,) = struct.unpack_from(f"{address_size}s", published, start + _LENGTH.size)
            numbers = published[start + _LENGTH.size + address_size :]
            (family,) = _FAMILY.unpack_from(address)
            (port,) = _PORT.unpack_from(address, 2)
            packed = {socket.AF_INET: address[4:8], socket.AF_INET6: address[8:24]}[socket.AddressFamily(family)]
            host = socket.inet_ntop(family, packed)
            return cls((host, port), tuple(number for (number,) in _SEQUENCE.iter_unpack(numbers)))
        except (struct.error, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"unknown format of a Gloo address: {len(published)} bytes") from error


Sockets = list[tuple[int, int]]
"""Descriptors of sockets with their inodes. No other socket has the inode, although one may get the descriptor."""


@dataclass(slots=True)
class Found:
    """Sockets with the addresses of a Gloo context."""

    listening: Sockets = field(default_factory=list)
    accepted: Sockets = field(default_factory=list)
    outgoing: Sockets = field(default_factory=list)
    is_shared: bool = False
    """Whether peers are in this process. Some of the outgoing connections are theirs, then."""

    def all(self) -> Sockets:
        return self.listening + self.accepted + self.outgoing

    def own(self) -> Sockets:
        """Return the connections of the context itself."""
        polled = _polled_with({number for _, number in self.listening}) if self.is_shared else None
        return self.accepted + [one for one in self.outgoing if polled is None or one[1] in polled]


def find(listener: Endpoint, peers: set[Endpoint], *, connecting: bool = False) -> Found:
    """Find the sockets at ``listener``, and those connected to ``peers``.

    ``connecting``: include connections whose first packet has no answer yet; this reads the kernel's socket table.
    """
    pending = _unanswered(peers) if connecting else frozenset()
    found = Found()
    for descriptor, one in process_sockets():
        if is_tcp(one):
            local, peer = local_endpoint(one), peer_endpoint(one)
            if local == listener:
                (found.listening if peer is None else found.accepted).append((descriptor, inode(one)))
            elif peer in peers or inode(one) in pending:
                found.outgoing.append((descriptor, inode(one)))
            elif peer is None and local in peers:
                found.is_shared = True
    return found


def shut_down(connections: Sockets) -> int:
    """Shut down connections. Return the number of those that were open."""
    count = 0
    for descriptor, number in connections:
        with contextlib.suppress(OSError), duplicate(descriptor, number) as connection:  # already closed
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def finish_sending(connections: Sockets) -> list[socket.socket]:
    """Tell the peers that this process sends no more. Return duplicates of the connections.

    Close a duplicate after its peer has closed. A connection that is closed before ends with a reset if its peer sends
    anything, such as the begin of the next collective; a reset cuts off what the peer has not yet received.
    """
    ended = []
    for descriptor, number in connections:
        with contextlib.suppress(OSError):  # its peer has closed, and then Gloo
            connection = duplicate(descriptor, number)
            ended.append(connection)
            claim(connection)
            connection.shutdown(socket.SHUT_WR)
    return ended


def are_open(connections: Sockets) -> bool:
    """Return whether all of these are open. Gloo closes a connection when its peer has closed it."""
    try:
        return all(os.fstat(descriptor).st_ino == number for descriptor, number in connections)
    except OSError:
        return False


def greet(listener: Endpoint, sequence_numbers: tuple[int, ...]) -> list[socket.socket]:
    """Connect to the own listener in place of every peer, so that Gloo stops waiting for peers that never connect.

    Keep the sockets open until Gloo's constructor has returned.
    """
    greetings = []
    for number in sequence_numbers:
        with contextlib.suppress(OSError):  # Gloo has closed the listener: it no longer waits
            greeting = socket.create_connection(listener, timeout=1.0)
            greetings.append(greeting)
            greeting.sendall(_SEQUENCE.pack(number))
    return greetings


def _polled_with(listening: set[int]) -> set[int] | None:
    """Return the inodes of the sockets in the epoll instance that has one of ``listening``.

    None: none has, or the kernel does not tell.
    """
    with contextlib.suppress(OSError):  # such as no descriptor left for the listing
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # closed in between
                if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":  # noqa: PTH115
                    told = Path(f"/proc/self/fdinfo/{name}").read_text()
                    polled = {int(number, 16) for number in _POLLED.findall(told)}
                    if polled & listening:
                        return polled
    return None


def _unanswered(peers: set[Endpoint]) -> frozenset[int]:
    """Return the inodes of sockets that are connecting to one of ``peers``."""
    wanted = {_kernel_text(peer) for peer in peers}
    inodes = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _SYN_SENT and fields[2] in wanted:
                    inodes.add(int(fields[9]))
    return frozenset(inodes)


def _kernel_text(endpoint: Endpoint) -> str:
    """Return the kernel's hexadecimal text: the words of the address in the machine's byte order, then the port."""
    host, port = endpoint
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
