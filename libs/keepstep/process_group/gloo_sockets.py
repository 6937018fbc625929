"""Find the sockets of one Gloo context by the addresses that its ranks published, and shut them down.

torch's ``abort`` does not end a Gloo operation in flight; a shutdown of its connections does, within a millisecond. An
accepted connection has the address of this process's listener as its local address; an initiated one has the address
of a peer's listener as its remote address. The listening socket is never shut down, because Gloo ends the process when
``accept`` fails.
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
    """The data that a rank publishes: its address, and the number with which each peer identifies itself."""

    listener: Endpoint
    sequence_numbers: tuple[int, ...]

    @classmethod
    def parse(cls, published: bytes) -> GlooRank:
        """Parse the bytes that Gloo stores for a rank.

        They are the host name and the ``sockaddr_storage``, each after its length, then a number for each rank.

        Raises:
            ValueError: the bytes have another format.
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
    """Shut down this process's connections from ``listener`` and to ``peers``; return their number.

    ``connecting``: also connections whose first packet has no answer yet, from the kernel's table of all sockets.
    """
    pending = _unanswered(peers) if connecting else frozenset()
    count = 0
    for _, found in process_sockets():
        if _is_ours(found, listener, peers) or inode(found) in pending:
            with contextlib.suppress(OSError):  # it has ended already
                found.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connections(listener: Endpoint, peers: set[Endpoint]) -> int:
    """Count the connections from ``listener`` and to ``peers``."""
    return sum(_is_ours(found, listener, peers) for _, found in process_sockets())


def sockets(listener: Endpoint, peers: set[Endpoint], *, connecting: bool = False) -> list[tuple[int, int]]:
    """Return (descriptor, inode) of the connections and of the listening socket. ``connecting``: see ``shut_down``."""
    pending = _unanswered(peers) if connecting else frozenset()
    return [
        (descriptor, inode(found))
        for descriptor, found in process_sockets()
        if is_tcp(found)
        and (peer_endpoint(found) in peers or local_endpoint(found) == listener or inode(found) in pending)
    ]


def greet(listener: Endpoint, sequence_numbers: tuple[int, ...]) -> list[socket.socket]:
    """Connect to this process's own listener as every peer, so that Gloo stops waiting for peers.

    The sockets must stay open until Gloo's constructor has returned.
    """
    greetings = []
    for number in sequence_numbers:
        with contextlib.suppress(OSError):  # Gloo has closed the listener, so it does not wait
            greeting = socket.create_connection(listener, timeout=1.0)
            greetings.append(greeting)
            greeting.sendall(_SEQUENCE.pack(number))
    return greetings


def _is_ours(found: socket.socket, listener: Endpoint, peers: set[Endpoint]) -> bool:
    peer = peer_endpoint(found) if is_tcp(found) else None
    return peer is not None and (peer in peers or local_endpoint(found) == listener)


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
    """Return the endpoint as the kernel prints it: address words in machine order and port, in hexadecimal."""
    host, port = endpoint
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
