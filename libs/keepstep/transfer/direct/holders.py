"""Messages by which the joiners of one source exchange their chunk lists without a relay. Pure.

The request ``GET /holders/<lease>`` of a joiner has header fields with its name, the address where it serves chunks,
and a bitmap of these chunks. The answer lists the other joiners of the same snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgpack

from keepstep.state.errors import TransferError

NAME, ADDRESS, HAS = "Keepstep-Joiner", "Keepstep-Serves", "Keepstep-Has"
MAX_NAME, MAX_ADDRESS = 64, 512
MAX_REPORTED_CHUNKS = 16_384
"""Chunks whose bits fit into the head of a request: 128 GiB. A joiner does not report later chunks."""


def joiner_fields(name: str, address: str, has: int, chunks: int) -> str:
    """Return the header lines of a joiner that has the chunks ``has`` (bits) of ``chunks``."""
    known = min(chunks, MAX_REPORTED_CHUNKS)
    bitmap = (has & ((1 << known) - 1)).to_bytes(-(-known // 8), "little").hex()
    return f"{NAME}: {name}\r\n{ADDRESS}: {address}\r\n{HAS}: {bitmap}\r\n"


def read_joiner_fields(fields: Mapping[str, str]) -> tuple[str, str, bytes]:
    """Return the name, address and bitmap of a joiner from header fields in lower case. Raises ``ValueError``."""
    name, address = fields.get(NAME.lower(), ""), fields.get(ADDRESS.lower(), "")
    if not 0 < len(name) <= MAX_NAME or not 0 < len(address) <= MAX_ADDRESS:
        raise ValueError(
            f"the header fields {NAME} (1-{MAX_NAME} characters) and {ADDRESS} (1-{MAX_ADDRESS}) are required"
        )
    return name, address, bytes.fromhex(fields.get(HAS.lower(), ""))


def pack_holders(holders: Iterable[tuple[str, str, bytes]]) -> bytes:
    """Return the body of an answer: name, address and bitmap of each holder."""
    packed: bytes = msgpack.packb([list(one) for one in holders])
    return packed


def read_holders(data: bytes) -> dict[str, tuple[str, int]]:
    """Return the address and chunks of each holder by name. Raises ``TransferError`` for an invalid body."""
    try:
        return {
            str(name): (str(address), int.from_bytes(has, "little")) for name, address, has in msgpack.unpackb(data)
        }
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise TransferError(f"invalid list of joiners from the source: {error!r}") from error
