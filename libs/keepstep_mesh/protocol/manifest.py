"""The envelope of a manifest: which chunks a state is made of, readable without torch. docs/checkpoint-format.md is its
page; ``state_content`` reads what the chunks mean (``content``).

A manifest from the network is hostile until it is read: nothing here takes more memory than a few times its length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from typing import Any

import msgpack
import xxhash

from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.records import Format

FORMAT = "keepstep-state"
VERSION = 1
ALIGNMENT = 64
"""Every region starts at a multiple of this many bytes of its pack."""
CHUNK_BYTES = 8 << 20
"""A pack is verified, sent and fetched in pieces of this size; the last one is shorter."""
MAX_MANIFEST_BYTES = 32 << 20
MAX_PACK_BYTES = 1 << 46
MAX_REGIONS = MAX_MANIFEST_BYTES // 8
"""A region belongs to a tensor, and the row of a tensor is longer."""
DIGEST_BYTES = 16
MIN_PART_BYTES = 256 << 10
MAX_PART_DIGESTS = (4 << 20) // DIGEST_BYTES
"""Of one pack. Larger packs have larger parts."""
_FIXED = {"chunk_bytes": CHUNK_BYTES, "chunk_digest": "xxh3-128", "root_digest": "blake2b-256"}
_UNREADABLE = (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a state comes from. Not part of the root digest: equal states of two producers have equal roots."""

    checkpoint_id: str = ""
    job: str = ""
    step: int = 0
    quorum_id: int = 0
    producer: str = ""


@dataclass(frozen=True)
class Parts:
    """Digests of the parts of a pack. A part lies in one chunk, so a reader can verify less than a chunk."""

    size: int
    """Bytes of each part; the last one is shorter. A power of two, at most ``CHUNK_BYTES``."""
    digests: bytes
    """One after the other."""

    def digest(self, number: int) -> bytes:
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


@dataclass(frozen=True)
class Envelope:
    origin: Origin
    content_bytes: bytes
    """``content`` as it travels: the root digest is over these bytes."""
    pack_bytes: int
    chunk_digests: tuple[bytes, ...]
    root: bytes
    parts: Parts
    """The chunks, if the manifest has no parts."""


def aligned(position: int) -> int:
    return (position + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def region_positions(regions: Iterable[int]) -> list[int]:
    """Where each region starts in the pack; one more at the end: the length of the pack."""
    lengths = list(regions)
    ends = list(accumulate(lengths, lambda end, length: aligned(end) + length, initial=0))
    return [*(end - length for end, length in zip(ends[1:], lengths, strict=True)), ends[-1]]


def chunk_count(pack_bytes: int) -> int:
    return -(-pack_bytes // CHUNK_BYTES)


def chunk_length(pack_bytes: int, chunk: int) -> int:
    """Return the size in bytes of the chunk with number ``chunk``."""
    return min(CHUNK_BYTES, pack_bytes - chunk * CHUNK_BYTES)


def part_size(pack_bytes: int) -> int:
    """Return the size in bytes of the parts of a pack."""
    size = MIN_PART_BYTES
    while size < CHUNK_BYTES and size * MAX_PART_DIGESTS < pack_bytes:
        size *= 2
    return size


def chunk_digest(data: Any) -> bytes:
    """Return the digest of an object with the buffer protocol, at about 30 GB/s, without the GIL."""
    return xxhash.xxh3_128_digest(data)


def chunk_digests(pieces: Iterable[memoryview]) -> bytes:
    """Of all chunks of a pack that comes in ``pieces`` of bytes, one digest after the other."""
    digests, chunk, room = bytearray(), xxhash.xxh3_128(), CHUNK_BYTES
    for piece in pieces:
        rest = piece
        while len(rest) >= room:
            if room == CHUNK_BYTES:
                digests += chunk_digest(rest[:room])
            else:
                chunk.update(rest[:room])
                digests += chunk.digest()
                chunk.reset()
            rest, room = rest[room:], CHUNK_BYTES
        chunk.update(rest)
        room -= len(rest)
    return bytes(digests if room == CHUNK_BYTES else digests + chunk.digest())


def cut_pieces(pieces: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Yield the pieces of each part of ``size`` bytes, the last one shorter, of bytes that come in other pieces."""
    part: list[memoryview] = []
    room = size
    for piece in pieces:
        start = 0
        while piece.nbytes - start >= room:
            yield [*part, piece[start : start + room]]
            start, part, room = start + room, [], size
        if start < piece.nbytes:
            part.append(piece[start:])
            room -= piece.nbytes - start
    if part:
        yield part


class PackHasher:
    """Digests of the chunks of a pack and of their parts, in one pass over its bytes.

    Args:
        pack_bytes: size of the pack.
    """

    def __init__(self, pack_bytes: int) -> None:
        self._size = part_size(pack_bytes)
        self._parts = bytearray()
        self._chunk = xxhash.xxh3_128()
        """Of the parts since the last end of a chunk."""
        self._digests = bytearray()

    def add(self, chunk: Iterable[memoryview]) -> None:
        """Hash the pieces of the next chunk, at about 20 GB/s."""
        for part in cut_pieces(chunk, self._size):
            self.add_part(part)
        self.end_chunk()

    def add_part(self, pieces: Sequence[memoryview]) -> None:
        """Hash the next part, which has these pieces. ``end_chunk`` follows the last part of a chunk."""
        part = xxhash.xxh3_128()
        for piece in pieces:
            part.update(piece)
            self._chunk.update(piece)  # still in the cache
        self._parts += part.digest()

    def end_chunk(self) -> None:
        """End the chunk of the parts that were added."""
        self._digests += self._chunk.digest()
        self._chunk.reset()

    @property
    def digests(self) -> bytes:
        """Digests of the chunks, one after the other."""
        return bytes(self._digests)

    @property
    def parts(self) -> Parts:
        return Parts(self._size, bytes(self._parts))


def root_digest(content_bytes: bytes, chunk_digests: bytes) -> bytes:
    root = hashlib.blake2b(digest_size=32)
    root.update(len(content_bytes).to_bytes(8, "little"))
    root.update(content_bytes)
    root.update(chunk_digests)
    return root.digest()


def pack_envelope(origin: Origin, content_bytes: bytes, chunk_digests: bytes, parts: Parts | None = None) -> bytes:
    """The manifest as it travels. ``chunk_digests``: one after the other. Without ``parts``, readers read chunks."""
    envelope = {
        "format": FORMAT,
        "version": VERSION,
        "origin": astuple(origin),
        "content": content_bytes,
        "chunk_bytes": CHUNK_BYTES,
        "chunk_digest": _FIXED["chunk_digest"],
        "chunks": chunk_digests,
        "root_digest": _FIXED["root_digest"],
        "root": root_digest(content_bytes, chunk_digests),
    }
    if parts is not None:
        envelope["parts"] = [parts.size, parts.digests, _digest_of_parts(parts)]
    packed: bytes = msgpack.packb(envelope)
    return packed


def _digest_of_parts(parts: Parts) -> bytes:
    """Return the digest that protects ``parts``. The root does not: it is the same with and without them."""
    return hashlib.blake2b(parts.size.to_bytes(8, "little") + parts.digests, digest_size=32).digest()


def read_envelope(data: bytes) -> Envelope:
    """Read the envelope of untrusted bytes. Raises ``ManifestError`` with the reason if it is invalid."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest too large: {len(data)} bytes (limit {MAX_MANIFEST_BYTES})")
    try:
        # Its lists are few and short, because content and chunks are bytes.
        top = msgpack.unpackb(data, max_array_len=64, max_map_len=64)
    except _UNREADABLE as error:
        raise ManifestError(f"manifest is not msgpack: {str(error) or type(error).__name__}") from error
    if type(top) is not dict or top.get("format") != FORMAT:
        raise ManifestError("this is no keepstep manifest")
    if top.get("version") != VERSION:
        raise ManifestError(f"manifest of version {glimpse(top.get('version'))}; this build reads version {VERSION}")
    for name, value in _FIXED.items():
        if top.get(name) != value:
            raise ManifestError(f"{name} of the manifest is {glimpse(top.get(name))}; this build reads {value}")
    content_bytes, chunks, root = (typed(top.get(name), bytes, name) for name in ("content", "chunks", "root"))
    if root_digest(content_bytes, chunks) != root:
        raise ManifestError("the root digest does not fit the manifest: it was damaged on its way")
    pack_bytes = region_positions(_read_regions(content_bytes))[-1]
    if pack_bytes > MAX_PACK_BYTES:
        raise ManifestError(f"pack too large: {pack_bytes} bytes (limit {MAX_PACK_BYTES})")
    if len(chunks) != chunk_count(pack_bytes) * DIGEST_BYTES:
        raise ManifestError(f"{len(chunks)} bytes of chunk digests do not fit a pack of {pack_bytes} bytes")
    digests = tuple(chunks[start : start + DIGEST_BYTES] for start in range(0, len(chunks), DIGEST_BYTES))
    origin: Origin = _ORIGIN(top.get("origin"), "origin")
    parts = Parts(CHUNK_BYTES, chunks) if top.get("parts") is None else _read_parts(top["parts"], pack_bytes)
    return Envelope(origin, content_bytes, pack_bytes, digests, root, parts)


def _read_parts(value: Any, pack_bytes: int) -> Parts:
    if len(typed(value, list, "parts")) < 3:
        raise ManifestError("parts has too few fields")
    parts = Parts(typed(value[0], int, "size of a part"), typed(value[1], bytes, "digests of parts"))
    if not MIN_PART_BYTES <= parts.size <= CHUNK_BYTES or CHUNK_BYTES % parts.size:
        raise ManifestError(f"size of a part is {glimpse(parts.size)}, expected a divisor of {CHUNK_BYTES}")
    if len(parts.digests) != -(-pack_bytes // parts.size) * DIGEST_BYTES:
        raise ManifestError(f"{len(parts.digests)} bytes of digests of parts do not fit a pack of {pack_bytes} bytes")
    if typed(value[2], bytes, "digest of parts") != _digest_of_parts(parts):
        raise ManifestError("the digests of parts do not fit their own digest: they were damaged on their way")
    return parts


def _read_regions(content_bytes: bytes) -> list[int]:
    """Return the lengths of the regions. The parts of ``content`` before them are skipped, not decoded."""
    reader = msgpack.Unpacker(max_buffer_size=MAX_MANIFEST_BYTES, max_array_len=MAX_REGIONS)
    try:
        reader.feed(content_bytes)
        if reader.read_array_header() != 3:
            raise ManifestError("content must be a list of tree, tensors and regions")
        reader.skip()
        reader.skip()
        lengths = reader.unpack()
        end = reader.tell()
    except _UNREADABLE as error:
        raise ManifestError(f"content is not msgpack: {str(error) or type(error).__name__}") from error
    if end != len(content_bytes):
        raise ManifestError("content is not msgpack: something follows it")
    return [size(length, "length of a region") for length in typed(lengths, list, "regions")]


# ---- checks of hostile values


def glimpse(value: Any) -> str:
    """A hostile value for an error message: short, and without walking through it."""
    return str(value)[:40] if value is None or type(value) in (bool, int, float, str) else type(value).__name__


def typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise ManifestError(f"{what} must be {kind.__name__}, not {type(value).__name__}")
    return value


def size(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_PACK_BYTES:
        raise ManifestError(f"{what} must be an integer in [0, 2^46], not {glimpse(value)}")
    return value


_ORIGIN = Format(
    ManifestError, {str: lambda value, what: typed(value, str, what), int: lambda value, what: typed(value, int, what)}
).of_list(Origin, "origin", least=len(fields(Origin)))
