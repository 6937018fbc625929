"""Find the sockets of one Gloo context by the addresses that its ranks published, and shut them down.

torch's ``abort`` does not end a Gloo operation in flight; shutting down its connections ends it within a millisecond.
An accepted connection has the address of the own listener as its local address. An outgoing connection has a peer's
listener as its remote address. The listening socket is never shut down: Gloo ends the process if accepting fails.
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


def shut_down(listener: Endpoint, peers: set[Endpoint], *, connecting: bool = False) -> int:
    """Shut down this process's connections from ``listener`` and to ``peers``. Return their number.

    ``connecting``: include connections whose first packet has no answer yet; this reads the kernel's socket table.
    """
    pending = _unanswered(peers) if connecting else frozenset()
    count = 0
    for _, found in process_sockets():
        if _is_ours(found, listener, peers) or inode(found) in pending:
            with contextlib.suppress(OSError):  # already closed
                found.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connections(listener: Endpoint, peers: set[Endpoint]) -> int:
    """Return the number of connections from ``listener`` and to ``peers``."""
    return sum(_is_ours(found, listener, peers) for _, found in process_sockets())


def sockets(listener: Endpoint, peers: set[Endpoint], *, connecting: bool = False) -> list[tuple[int, int]]:
    """Return (descriptor, inode) of these connections and of the listener. ``connecting``: see ``shut_down``."""
    pending = _unanswered(peers) if connecting else frozenset()
    return [
        (descriptor, inode(found))
        for descriptor, found in process_sockets()
        if is_tcp(found)
        and (peer_endpoint(found) in peers or local_endpoint(found) == listener or inode(found) in pending)
    ]


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
    """Return the kernel's hexadecimal text: the words of the address in the machine's byte order, then the port."""
    host, port = endpoint
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
