"""Read processes of this user from /proc: command, environment, listening addresses, memory, and descriptors."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
GONE = (ProcessLookupError, FileNotFoundError, PermissionError)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
    """Return the oldest process of this user that listens at ``host`` and ``port``, in any network namespace.

    Without a ``host``: at any address.
    """
    by_namespace: dict[str, list[int]] = {}
    for pid in own_processes():
        with contextlib.suppress(*GONE):
            by_namespace.setdefault(namespace(pid), []).append(pid)
    for pids in by_namespace.values():
        wanted = {f"socket:[{inode}]" for inode in _inodes(pids[0], host, port)}
        holders = [pid for pid in pids if wanted and wanted & _sockets(pid)]
        if holders:
            return min(holders, key=_started)
    return None


def _inodes(pid: int, host: str, port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(*GONE):
            for line in (PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                address, _, found = words[1].partition(":")
                if words[3] == LISTENS and int(found, 16) == port and _listens_at(address, host):
                    yield words[9]


def _listens_at(address: str, host: str) -> bool:
    words = bytes.fromhex(address)
    packed = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    ours = ipaddress.ip_address(packed)
    return ours.is_unspecified or not host or str(ours) in (host, "127.0.0.1" if host == "localhost" else host)


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
