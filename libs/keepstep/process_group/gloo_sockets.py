"""The sockets of one Gloo context, found by the addresses that its ranks published, so that it can be interrupted.

torch's ``abort`` does nothing to a Gloo operation in flight; shutting its connections down ends it within a
millisecond. A connection that we accepted has our listener's address as its own, one that we made has a peer's listener
at the other end. The listening socket itself is never touched: Gloo ends the process when accepting fails.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from keepstep_mesh.net.process_sockets import Endpoint, inode, is_tcp, local_endpoint, peer_endpoint, process_sockets

_LENGTH = struct.Struct("=Q")
_SEQUENCE = struct.Struct("=q")
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")
_SYN_SENT = "02"


@dataclass(frozen=True, slots=True)
class GlooRank:
    """What a rank publishes: where it listens, and the number by which each peer says who it is when it connects."""

    listener: Endpoint
    sequence_numbers: tuple[int, ...]

    @classmethod
    def parse(cls, published: bytes) -> GlooRank:
        """Reads what Gloo stores for a rank: host name and ``sockaddr_storage``, their lengths in front, then a number
        for each rank.

        :raises ValueError: they are something else.
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
            raise ValueError(f"Gloo published {len(published)} bytes that are not a rank's address") from error


def shut_down(listener: Endpoint, peers: set[Endpoint], *, connecting: bool = False) -> int:
    """Shuts down this process's connections from ``listener`` and to ``peers``; returns how many.

    ``connecting``: those too whose first packet was not answered yet (this reads the kernel's table of all sockets).
    """
    pending = _unanswered(peers) if connecting else frozenset()
    count = 0
    for _, found in process_sockets():
        if _is_ours(found, listener, peers) or inode(found) in pending:
            with contextlib.suppress(OSError):  # it ended by itself
                found.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connections(listener: Endpoint, peers: set[Endpoint]) -> int:
    """How many connections there are from ``listener`` and to ``peers``."""
    return sum(_is_ours(found, listener, peers) for _, found in process_sockets())


def sockets(listener: Endpoint, peers: set[Endpoint], *, connecting: bool = False) -> list[tuple[int, int]]:
    """(descriptor, inode) of the listening socket too. ``connecting``: see ``shut_down``."""
    pending = _unanswered(peers) if connecting else frozenset()
    return [
        (descriptor, inode(found))
        for descriptor, found in process_sockets()
        if is_tcp(found)
        and (peer_endpoint(found) in peers or local_endpoint(found) == listener or inode(found) in pending)
    ]


def greet(listener: Endpoint, sequence_numbers: tuple[int, ...]) -> list[socket.socket]:
    """Connects to our own listener in the name of every peer, so that Gloo stops waiting for those that never come.

    The sockets must stay open until Gloo's constructor has returned.
    """
    greetings = []
    for number in sequence_numbers:
        with contextlib.suppress(OSError):  # Gloo closed the listener meanwhile: nobody waits on it
            greeting = socket.create_connection(listener, timeout=1.0)
            greetings.append(greeting)
            greeting.sendall(_SEQUENCE.pack(number))
    return greetings


def _is_ours(found: socket.socket, listener: Endpoint, peers: set[Endpoint]) -> bool:
    peer = peer_endpoint(found) if is_tcp(found) else None
    return peer is not None and (peer in peers or local_endpoint(found) == listener)


def _unanswered(peers: set[Endpoint]) -> frozenset[int]:
    """Inodes of sockets that are being connected to one of ``peers``."""
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
    """As the kernel prints it: words of the address in the machine's order, the port, in hexadecimal."""
    host, port = endpoint
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
