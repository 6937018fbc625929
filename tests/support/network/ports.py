"""Ports for servers of tests that must be known before the server starts, or that a restarted server takes again.

They lie below the range from which the kernel takes ports for connections and for servers that bind port 0. A port of
that range can be taken by any other test while no server listens on it.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator

FIRST, SLICE, SLICES = 10_000, 1_400, 16
"""The first port; how many ports each process of pytest-xdist has for itself, and for how many processes."""


def _ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SLICES
    start = random.SystemRandom().randrange(SLICE)  # another run of the tests may use this machine
    for number in itertools.count(start):
        yield FIRST + worker * SLICE + number % SLICE


_next = _ports()


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no process listens. This process does not get it again soon."""
    for port in itertools.islice(_next, SLICE):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"all ports from {FIRST} to {FIRST + SLICES * SLICE} that this process may use are in use")


def free_ports(number: int) -> list[int]:
    return [free_port() for _ in range(number)]
