"""Load one rank's part of a durable checkpoint from the relays that have it, into the tensors of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import Connection, Endpoint
from keepstep.relay_client.relay_link import DamagedBytes, RelayLink, is_absent
from keepstep.relay_client.relay_requests import RelayCheckpoint, ask_chunk
from keepstep.state.errors import StateDamaged, TransferError, TransferTimeout
from keepstep.state.restoring import Destination
from keepstep.state.state_manifest import read_manifest
from keepstep.transfer.receiving import ChunkReceiver
from keepstep_mesh.protocol.manifest import chunk_length
from keepstep_mesh.threads.starting import ThreadPoolExecutor

T = TypeVar("T")

LOAD_STREAMS = 4


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
    checkpoint = RelayCheckpoint(job, name)
    manifest = read_manifest(
        _asking(relays, deadline, rank, lambda link: link.ask(partial(checkpoint.manifest, rank=rank)))
    )
    destination = Destination(manifest.content, into)
    chunks, lock = iter(range(len(manifest.chunk_digests))), threading.Lock()
    failed = threading.Event()

    def load_chunk(connection: Connection, receiver: ChunkReceiver, chunk: int) -> None:
        digest = manifest.chunk_digests[chunk]
        ask_chunk(connection, digest, chunk_length(destination.pack_bytes, chunk))
        if receiver.receive(connection, chunk)[0] != digest:
            raise DamagedBytes(f"chunk {chunk} from {connection.address} arrived damaged")

    def load_chunks(link: RelayLink) -> None:
        receiver = ChunkReceiver(destination)
        try:
            while not failed.is_set():
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                link.ask(partial(load_chunk, receiver=receiver, chunk=chunk))
        except BaseException:
            failed.set()
            raise

    try:
        with ThreadPoolExecutor(LOAD_STREAMS, "keepstep-durable-load") as pool:
            places = range(rank, rank + LOAD_STREAMS)
            for stream in [pool.submit(_asking, relays, deadline, place, load_chunks) for place in places]:
                stream.result()
        return destination.result()
    except TransferError as error:
        error.torn = error.torn or destination.in_place_bytes > 0
        raise


def _asking(relays: Sequence[Endpoint], deadline: Deadline, place: int, work: Callable[[RelayLink], T]) -> T:
    """Return the result of ``work`` with a link that begins at the relay with number ``place``, so that all share it.

    Raises:
        StateDamaged: every relay answers, and none has the bytes undamaged.
        TransferError: every relay refuses, or none answers.
    """
    first = place % len(relays)
    link = RelayLink([*relays[first:], *relays[:first]], deadline)
    try:
        return work(link)
    except TransferTimeout:
        raise
    except TransferError as error:
        kind = StateDamaged if is_absent(error) else TransferError
        raise kind(f"every relay failed: {error}") from error
    finally:
        link.close()
