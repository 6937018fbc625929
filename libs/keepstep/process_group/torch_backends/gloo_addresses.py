"""Short form of Gloo addresses for the rendezvous, whose size does not grow with the number of members.

Gloo appends a number of 8 bytes for each member to an address, and every member reads all addresses: N members store
8 N^2 bytes and read 8 N^3. Here each communicator has a device of its own, on which the numbers are always 0 to N - 1.
"""

from __future__ import annotations

import struct

_SHORT = b"\xff" * 8
"""Prefix of a shortened address. An address of Gloo begins with the length of the host name."""


def _numbers(size: int) -> bytes:
    return struct.pack(f"={size}q", *range(size))


def shortened(published: bytes, size: int) -> bytes:
    """Return the address that Gloo publishes for a rank, without the numbers if they are 0 to ``size`` - 1."""
    numbers = _numbers(size)
    if published.startswith(_SHORT) or not published.endswith(numbers):
        return published
    return _SHORT + published[: -len(numbers)]


def lengthened(stored: bytes, size: int) -> bytes:
    """Undo ``shortened``. Return any other address unchanged."""
    return stored.removeprefix(_SHORT) + _numbers(size) if stored.startswith(_SHORT) else stored
