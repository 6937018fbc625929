"""Load one rank's part of a durable checkpoint from the relays that have it, into the tensors of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.state.errors import StateDamaged, TransferError, TransferTimeout
from keepstep.state.restoring import Destination
from keepstep.state.state_manifest import read_manifest
from keepstep.transfer.direct.receiving import ChunkReceiver
from keepstep.transfer.relayed.relay_client import checkpoints_path
from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES, chunk_length
from keepstep_mesh.threads.starting import ThreadPoolExecutor

LOAD_STREAMS = 4
LOAD_STALL_SECONDS = 30.0
"""Without a byte for this long, a chunk is requested from another relay. Less, so that all can be asked in time."""
LOAD_ATTEMPTS = 3
"""Attempts at a chunk, per relay."""

LOST = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.GONE})
"""Answers of a relay that does not have the bytes, and does not expect them."""

T = TypeVar("T")


class _DamagedChunk(BrokenConnection):
    """A chunk did not arrive as it was stored."""


class _Reader:
    """Requests of one thread. Each failure moves on to the next relay."""

    def __init__(self, relays: Sequence[Endpoint], deadline: Deadline, place: int) -> None:
        self._relays = relays
        self._deadline = deadline
        self._place = place
        self._connection: Connection | None = None

    def ask(self, work: Callable[[Connection], T]) -> T:
        """Return the result of ``work`` on a connection to a relay.

        Raises:
            StateDamaged: every relay answers, and none has the bytes undamaged.
            TransferError: every relay fails.
        """
        problems: list[str] = []
        damaged: set[str] = set()
        for attempt in range(1, LOAD_ATTEMPTS * len(self._relays) + 1):
            relay = self._relays[self._place % len(self._relays)]
            try:
                if self._connection is None:
                    stall = min(LOAD_STALL_SECONDS, self._deadline.seconds / (len(self._relays) + 1))
                    self._connection = Connection(relay, self._deadline, stall)
                    self._connection.connect()
                return work(self._connection)
            except TransferTimeout:
                raise
            except (BrokenConnection, TransferError) as error:
                problems.append(str(error))
                self._place += 1
                self.close()
                refusal = error if isinstance(error, Refusal) else None
                lost = isinstance(error, _DamagedChunk) or (refusal is not None and refusal.status in LOST)
                (damaged.add if lost else damaged.discard)(relay.address)
                if refusal is not None and attempt % len(self._relays) == 0:
                    time.sleep(min(refusal.retry_after, self._deadline.remaining()))  # as the relay asks in Retry-After
        kind = StateDamaged if len(damaged) == len(self._relays) else TransferError
        raise kind(f"every relay failed: {'; '.join(dict.fromkeys(problems))}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def load_rank(relays: Sequence[Endpoint], job: str, name: str, rank: int, *, into: Any, seconds: float) -> Any:
    """Load the state of ``rank``, and verify every chunk.

    Args:
        relays: that have the checkpoint, at least one.
        job: of the checkpoint.
        name: of the checkpoint.
        rank: whose state.
        into: a state of the same structure; see ``CheckpointTransport.recv_checkpoint``.
        seconds: time without progress after which this fails.

    Returns:
        The state.

    Raises:
        StateMismatch: the state does not fit ``into``.
        StateDamaged: a chunk is damaged or missing at every relay.
        TransferError: the state was not received. If its ``torn`` is true, tensors of ``into`` may be half written.
    """
    deadline = Deadline(seconds, f"checkpoint {name} of job {job} was not loaded", float("inf"))
    path = f"{checkpoints_path(job)}/{name}/manifest?rank={rank}"
    first = _Reader(relays, deadline, rank)
    try:
        manifest = read_manifest(first.ask(lambda connection: _read_manifest(connection, path)))
    finally:
        first.close()
    destination = Destination(manifest.content, into)
    chunks, lock = iter(range(len(manifest.chunk_digests))), threading.Lock()
    failed = threading.Event()

    def load_chunk(connection: Connection, receiver: ChunkReceiver, chunk: int) -> None:
        digest = manifest.chunk_digests[chunk]
        _, length = connection.ask("GET", f"/v1/chunks/{digest.hex()}")
        if length != chunk_length(destination.pack_bytes, chunk):
            raise _DamagedChunk(f"wrong length of chunk {chunk} at {connection.address}: {length} bytes")
        if receiver.receive(connection, chunk)[0] != digest:
            raise _DamagedChunk(f"chunk {chunk} from {connection.address} arrived damaged")

    def load_chunks(place: int) -> None:
        reader, receiver = _Reader(relays, deadline, place), ChunkReceiver(destination)
        try:
            while not failed.is_set():
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                reader.ask(lambda connection, chunk=chunk: load_chunk(connection, receiver, chunk))  # type: ignore[misc]
        except BaseException:
            failed.set()
            raise
        finally:
            reader.close()

    try:
        with ThreadPoolExecutor(LOAD_STREAMS, "keepstep-durable-load") as pool:
            for stream in [pool.submit(load_chunks, rank + place) for place in range(LOAD_STREAMS)]:
                stream.result()
        return destination.result()
    except TransferError as error:
        error.torn = error.torn or destination.in_place_bytes > 0
        raise


def _read_manifest(connection: Connection, path: str) -> bytes:
    _, length = connection.ask("GET", path)
    if length > MAX_MANIFEST_BYTES:
        raise TransferError(f"manifest too large: {length} bytes (limit {MAX_MANIFEST_BYTES})")
    return bytes(connection.read(length))
