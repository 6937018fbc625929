"""Read processes of this user from /proc: command, environment, listening addresses, memory, and descriptors."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PROC = Path("/proc")
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
GONE = (ProcessLookupError, FileNotFoundError, PermissionError)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Program:
    """How a process was started, to start it again."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str

    def path(self, flag: str) -> Path | None:
        """Return the path that was given as ``flag PATH`` or ``flag=PATH``; a relative one begins at its folder."""
        for place, word in enumerate(self.argv):
            name, equals, value = word.partition("=")
            if name == flag and (equals or place + 1 < len(self.argv)):
                return Path(self.folder, value if equals else self.argv[place + 1])
        return None


@dataclass(frozen=True, slots=True)
class Usage:
    """Resident bytes and descriptors of a process."""

    resident_bytes: int
    descriptors: int


def program_of(pid: int) -> Program:
    """Return how ``pid`` was started. Raises OSError."""
    words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
    if not words:
        raise ProcessLookupError(f"process {pid} has no command line yet, or has ended")
    pairs = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    environment = dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
    return Program(tuple(map(os.fsdecode, words)), environment, str((PROC / str(pid) / "cwd").readlink()))


def alive(pid: int) -> bool:
    """Return whether ``pid`` runs, or is stopped; a zombie does not."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except GONE:
        return False


def usage(pid: int) -> Usage | None:
    """Return the resources of ``pid``; None: it has ended."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
        return Usage(pages * PAGE_BYTES, sum(1 for _ in (PROC / str(pid) / "fd").iterdir()))
    except GONE:
        return None


def namespace(pid: int | str) -> str:
    """Return the network namespace of ``pid``. Raises OSError."""
    return str((PROC / str(pid) / "ns" / "net").readlink())


def own_processes() -> Iterator[int]:
    for entry in PROC.iterdir():
        with contextlib.suppress(*GONE):
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                yield int(entry.name)


def listener(host: str, port: int) -> int | None:
    """Return the oldest process of this user that answers at ``host`` and ``port``, as seen from this process.

    A loopback address is that of this network namespace. Any other one must belong to the namespace of the process: a
    process that listens at all addresses of this machine is not the one at the address of another machine. Without a
    ``host``: at any address of this namespace.
    """
    ours = namespace("self")
    by_namespace: dict[str, list[int]] = {ours: []}
    for pid in own_processes():
        with contextlib.suppress(*GONE):
            by_namespace.setdefault(namespace(pid), []).append(pid)
    addresses = _looked_up(host)
    for name, pids in by_namespace.items():
        here = [one for one in addresses if (name == ours if one.is_loopback else _has_address(pids, one))]
        if not pids or (not here and (host or name != ours)):
            continue
        wanted = {f"socket:[{inode}]" for inode in _inodes(pids[0], here, port)}
        holders = [pid for pid in pids if wanted and wanted & _sockets(pid)]
        if holders:
            return min(holders, key=_started)
    return None


def _looked_up(host: str) -> list[Address]:
    """Return the addresses of a host; empty if it is unknown."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
        return [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in found]
    return []


def _has_address(pids: Sequence[int], address: Address) -> bool:
    """Return whether the network namespace of ``pids`` has this address."""
    with contextlib.suppress(*GONE, IndexError):
        folder = PROC / str(pids[0]) / "net"
        if isinstance(address, ipaddress.IPv6Address):
            return any(line.startswith(address.packed.hex()) for line in (folder / "if_inet6").open())
        lines = [line.split() for line in (folder / "fib_trie").read_text().splitlines()]
        return any(one[-1] == str(address) and after[1:] == ["host", "LOCAL"] for one, after in pairwise(lines))
    return False


def _inodes(pid: int, addresses: Sequence[Address], port: int) -> Iterator[str]:
    """``addresses``: empty: any."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(*GONE):
            for line in (PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                address, _, found = words[1].partition(":")
                if words[3] == LISTENS and int(found, 16) == port and _listens_at(address, addresses):
                    yield words[9]


def _listens_at(address: str, addresses: Sequence[Address]) -> bool:
    words = bytes.fromhex(address)
    packed = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    ours = ipaddress.ip_address(packed)
    return ours.is_unspecified or not addresses or ours in addresses


def _sockets(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(*GONE):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(*GONE):
                found.add(str(entry.readlink()))
    return found


def _started(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    except GONE:
        return 2**63
