"""Receive a chunk directly into its final memory, and hash it on arrival."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from keepstep.connection.http_connection import Connection
from keepstep.state.restoring import Destination

PIECE_BYTES = 1 << 20
SHORT_BYTES = 64 << 10


def digest_of(segments: Iterable[memoryview]) -> bytes:
    """Return the digest of the chunk that lies in ``segments``, in order."""
    hasher = xxhash.xxh3_128()
    for segment in segments:
        hasher.update(segment)
    return hasher.digest()


class ChunkReceiver:
    """Receives chunks into ``destination``. Each thread has its own."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._scratch = memoryview(bytearray(PIECE_BYTES))

    def receive(self, connection: Connection, chunk: int) -> tuple[bytes, int]:
        """Receive ``chunk``, and return its digest and size. Short segments pass through a buffer, many at a time."""
        hasher = xxhash.xxh3_128()
        short: list[memoryview] = []
        gathered = size = 0

        def receive(piece: memoryview) -> None:
            connection.read_into(piece)
            hasher.update(piece)

        def scatter() -> None:
            receive(self._scratch[:gathered])
            start = 0
            for segment in short:
                segment[:] = self._scratch[start : start + segment.nbytes]
                start += segment.nbytes
            short.clear()

        for segment in self._destination.segments(chunk):
            size += segment.nbytes
            if gathered and (segment.nbytes >= SHORT_BYTES or gathered + segment.nbytes > PIECE_BYTES):
                scatter()
                gathered = 0
            if segment.nbytes < SHORT_BYTES:
                short.append(segment)
                gathered += segment.nbytes
            else:
                for start in range(0, segment.nbytes, PIECE_BYTES):
                    receive(segment[start : start + PIECE_BYTES])
        if gathered:
            scatter()
        return hasher.digest(), size
