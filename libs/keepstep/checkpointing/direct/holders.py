"""What joiners that heal from one source tell each other, through that source, where no relay does it. Pure.

A joiner asks ``GET /holders/<lease>`` and says in header fields who it is, where it serves chunks, and which of them;
the answer lists the other joiners of the same snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgpack

from keepstep.checkpointing.errors import TransferError

NAME, ADDRESS, HAS = "Keepstep-Joiner", "Keepstep-Serves", "Keepstep-Has"
MAX_NAME, MAX_ADDRESS = 64, 512
MAX_TOLD_CHUNKS = 16_384
"""That fit into the head of a request: 128 GiB. A joiner with more of them keeps quiet about the rest."""


def told(name: str, address: str, has: int, chunks: int) -> str:
    """The header lines that say what a joiner has, as bits of an int."""
    known = min(chunks, MAX_TOLD_CHUNKS)
    bitmap = (has & ((1 << known) - 1)).to_bytes(-(-known // 8), "little").hex()
    return f"{NAME}: {name}\r\n{ADDRESS}: {address}\r\n{HAS}: {bitmap}\r\n"


def heard(fields: Mapping[str, str]) -> tuple[str, str, bytes]:
    """(name, address, bitmap) out of header fields in lower case. ValueError when that is not what they say."""
    name, address = fields.get(NAME.lower(), ""), fields.get(ADDRESS.lower(), "")
    if not 0 < len(name) <= MAX_NAME or not 0 < len(address) <= MAX_ADDRESS:
        raise ValueError(f"a joiner says its name in {NAME} and its address in {ADDRESS}")
    return name, address, bytes.fromhex(fields.get(HAS.lower(), ""))


def pack_holders(holders: Iterable[tuple[str, str, bytes]]) -> bytes:
    packed: bytes = msgpack.packb([list(one) for one in holders])
    return packed


def read_holders(data: bytes) -> dict[str, tuple[str, int]]:
    """Address and chunks of each, by name. ``TransferError`` for anything else."""
    try:
        return {
            str(name): (str(address), int.from_bytes(has, "little")) for name, address, has in msgpack.unpackb(data)
        }
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise TransferError(f"the source's list of joiners makes no sense: {error!r}") from error
