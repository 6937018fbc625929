"""Gloo addresses as they are stored at the rendezvous: their size must not grow with the number of members.

Gloo ends an address with a number of 8 bytes for each member, and every member reads the addresses of all: of N members
8 N^2 bytes are stored and 8 N^3 are read. On a device of its own, as ours, the numbers are 0 to N - 1 and say nothing.
"""

from __future__ import annotations

import struct

_SHORT = b"\xff" * 8
"""Before what is left of an address; Gloo's own begins with the length of the host's name."""


def _numbers(size: int) -> bytes:
    return struct.pack(f"={size}q", *range(size))


def shortened(published: bytes, size: int) -> bytes:
    """What Gloo publishes for a rank, without the numbers of ``size`` members if they only count."""
    numbers = _numbers(size)
    if published.startswith(_SHORT) or not published.endswith(numbers):
        return published
    return _SHORT + published[: -len(numbers)]


def lengthened(stored: bytes, size: int) -> bytes:
    """The inverse of ``shortened``; what was not shortened stays as it is."""
    return stored.removeprefix(_SHORT) + _numbers(size) if stored.startswith(_SHORT) else stored
