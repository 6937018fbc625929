"""Checkpoints at a relay, which coordinates the ranks: docs/relay.md, "Save with several ranks"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from http import HTTPStatus

from keepstep.checkpoint.places.target import Exchanged, SaveFacts
from keepstep.checkpoint.reading import Fill, StoredManifest
from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Refusal
from keepstep.relay_client.relay_link import is_absent, link_to
from keepstep.relay_client.relay_paths import AtRelay
from keepstep.relay_client.relay_requests import RelayCheckpoint, View, ask_chunk
from keepstep.relay_client.uploading import STREAMS, Packed, RelayUpload, StatesDiffer
from keepstep.state.errors import (
    AFTER_GOING_BACK,
    CheckpointAborted,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    TransferError,
    TransferTimeout,
)
from keepstep.state.pack import Pack
from keepstep.state.state_manifest import build_manifest
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Envelope, Origin, chunk_digest, chunk_length, read_envelope
from keepstep_mesh.threads.starting import ThreadPoolExecutor

WAIT_SECONDS = 20
"""Longest wait of one request at the relay."""
FAIL_SECONDS = 5.0

log = get_logger("keepstep.checkpoint")


class RelayTarget:
    """Saves the part of one rank. See ``CheckpointTarget``."""

    def __init__(self, location: AtRelay, facts: SaveFacts, deadline: Deadline, token: str | None) -> None:
        self._location = location
        self._facts = facts
        self._link = link_to(location, deadline, token)
        self._checkpoint = RelayCheckpoint(location.job, location.id, facts.rank, facts.producer)
        begins = {"step": facts.step, "kind": facts.kind, "ranks": facts.world_size, "overwrite": facts.overwrite}
        self._upload = RelayUpload(self._link, self._checkpoint, begins, streams=STREAMS)
        self._layout = b""
        self._packed: Packed | None = None
        self._ended = False
        """The upload ended, by another rank or its timeout, or it is not that of this save."""

    def begin(self) -> None:
        """See ``CheckpointTarget``."""
        with self._explained():
            state = self._upload.begin()["state"]
        if state == "committed" and self._facts.overwrite:
            raise CheckpointError(f"{self._location} was overwritten by another save just now: save again")
        if state == "committed":
            raise CheckpointError(
                f"Checkpoint already exists: {self._location} is committed: use another id, or pass overwrite=True. "
                f"{AFTER_GOING_BACK} (keepstep checkpoint rm)"
            )

    def exchange(self, layout: bytes) -> Exchanged:
        """See ``CheckpointTarget``."""
        self._layout = layout
        with self._explained():
            return self._upload.until_kept(lambda: self._exchange(layout))

    def _exchange(self, layout: bytes) -> Exchanged:
        ask, one, rank = self._upload.ask, self._checkpoint, self._facts.rank
        digests: list[str | None] = []
        while not digests or None in digests:
            if not digests or digests[rank] is None:  # or the relay has restarted
                ask(lambda connection: one.put_layout(connection, layout))
            digests = ask(lambda connection: one.layouts(connection, self._wait_seconds()))
        known = [bytes.fromhex(digest) for digest in digests if digest is not None]
        different = {digest: number for number, digest in enumerate(dict.fromkeys(known))}
        return Exchanged(
            tuple(layout if digest == chunk_digest(layout) else self._get_layout(digest) for digest in different),
            tuple(different[digest] for digest in known),
        )

    def _get_layout(self, digest: bytes) -> bytes:
        """Return the layout of other ranks. Not found: the relay has restarted."""
        return self._upload.ask(lambda connection: self._checkpoint.layout(connection, digest))

    def store(self, pack: Pack) -> None:
        """See ``CheckpointTarget``."""
        facts = self._facts
        hasher = pack.digests()
        origin = Origin(self._location.id, self._location.job, facts.step, 0, facts.producer)
        manifest = build_manifest(origin, pack.content_bytes, hasher.digests, hasher.parts)
        self._packed = Packed(manifest, read_envelope(manifest), pack.chunk)
        self._send()

    def _send(self) -> None:
        assert self._packed is not None
        with self._explained():
            try:
                self._upload.send(self._packed)
            except Refusal as refusal:
                if refusal.status != HTTPStatus.GONE:
                    raise
                self._state()  # raises, unless it was committed and dropped since: an answer of the relay was lost

    def commit(self) -> None:
        """See ``CheckpointTarget``."""
        while (answer := self._until_state())["state"] != "committed":
            self._link.deadline.remaining()
            if answer["layout_wanted"]:  # the relay has restarted, as below
                with self._explained():
                    self._upload.until_kept(self._put_layout)
            if not answer["reported"]:
                self._send()

    def _put_layout(self) -> None:
        self._upload.ask(lambda connection: self._checkpoint.put_layout(connection, self._layout))

    def _until_state(self) -> View:
        with self._explained():
            return self._upload.until_kept(self._state)

    def _state(self) -> View:
        """Return the answer of the relay about the other ranks, after a wait."""
        return self._upload.ask(lambda connection: self._checkpoint.state(connection, self._wait_seconds()))

    def _wait_seconds(self) -> float:
        return min(WAIT_SECONDS, self._link.deadline.remaining() / 2)

    def fail(self, error: str) -> None:
        """See ``CheckpointTarget``."""
        if self._ended:  # the others know; a quick one may have begun the next attempt already
            return
        self._link.close()  # its connections have the deadline of the save, which may have passed
        self._link.deadline = Deadline(FAIL_SECONDS, "the failure did not reach the relay")
        text = error[:1000].encode(errors="backslashreplace").decode() or "unknown error"
        try:
            self._tell(text)
        except (TransferError, BrokenConnection) as problem:
            if not (isinstance(problem, Refusal) and problem.status == HTTPStatus.GONE):
                log.warning("the failure did not reach the other ranks", reason=str(problem))

    def _tell(self, error: str) -> None:
        try:
            self._link.ask(lambda connection: self._checkpoint.fail(connection, error))
        except Refusal as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND:
                raise
            self._upload.begin()  # the relay has restarted, and the others begin again
            reason = f"rank {self._facts.rank} failed: {error}"
            self._link.ask(lambda connection: self._checkpoint.abort(connection, reason))

    def close(self) -> None:
        """See ``CheckpointTarget``."""
        self._packed = None
        self._link.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise ``CheckpointError`` for an answer that ends the save."""
        try:
            yield
        except StatesDiffer as error:
            self._ended = self._facts.overwrite and self._facts.world_size == 1  # the upload is that of another save
            raise CheckpointError(
                f"rank {self._facts.rank} of {self._location} has another state already, of a process that ended or of "
                f"another save: abort it, wait until it expires (--upload-timeout), or use another id"
            ) from error
        except TransferTimeout:
            raise
        except TransferError as error:
            if isinstance(error, Refusal) and error.status == HTTPStatus.GONE:
                self._ended = True
                raise CheckpointAborted(f"{self._location} was aborted: {error}") from error
            raise CheckpointError(f"{self._location} was not saved: {error}") from error


class RelaySource:
    """Reads a committed checkpoint. See ``PackSource``.

    Args:
        location: the checkpoint.
        deadline: of the whole load.
        token: see ``link_to``.
    """

    def __init__(self, location: AtRelay, deadline: Deadline, token: str | None) -> None:
        self._location = location
        self._link = link_to(location, deadline, token)
        self._checkpoint = RelayCheckpoint(location.job, location.id)
        self._envelopes: list[Envelope] = []

    def manifests(self) -> list[StoredManifest]:
        """See ``PackSource``."""
        with self._explained():
            facts = self._link.ask(self._checkpoint.show)
        if facts["state"] != "committed":
            raise CheckpointNotFound(f"{self._location} is not committed: its state is {facts['state']}")
        self._checkpoint.pin(facts)

        def manifest(rank: int) -> bytes:
            with self._explained():
                found = self._link.ask(lambda connection: self._checkpoint.manifest(connection, rank))
            self._link.deadline.progressed()
            return found

        with ThreadPoolExecutor(STREAMS, "keepstep-load") as pool:
            found = list(pool.map(manifest, range(facts["ranks"])))
        try:
            self._envelopes = [read_envelope(one) for one in found]
        except ManifestError as error:
            raise CheckpointDamaged(f"a manifest of {self._location} is damaged: {error}") from error
        self._link.close()  # until the first read
        return [StoredManifest(*one) for one in zip(found, self._envelopes, strict=True)]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            kind = CheckpointNotFound if is_absent(refusal) else CheckpointError
            raise kind(f"{self._location} cannot be read: {refusal}") from refusal

    def fetch(self, rank: int, offset: int, length: int, receive: Callable[[Fill], None]) -> None:
        """See ``PackSource``."""
        envelope, chunk = self._envelopes[rank], offset // CHUNK_BYTES
        is_chunk = length == chunk_length(envelope.pack_bytes, chunk)

        def ask(connection: Connection) -> None:
            if is_chunk:
                ask_chunk(connection, envelope.chunk_digests[chunk], length)
            else:
                self._checkpoint.ask_range(connection, rank, offset, length)
            receive(connection.read_into)

        try:
            self._link.ask(ask)
        except Refusal as refusal:
            with self._explained():
                self._link.ask(self._checkpoint.show)  # raises if the checkpoint was overwritten or deleted since
            raise CheckpointDamaged(f"chunk {chunk} of {self.name(rank)} cannot be read: {refusal}") from refusal

    def name(self, rank: int) -> str:
        """See ``PackSource``."""
        return f"rank {rank} of {self._location}"

    def close(self) -> None:
        """See ``PackSource``."""
        self._link.close()
