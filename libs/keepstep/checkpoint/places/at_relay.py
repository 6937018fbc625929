"""Checkpoints at a relay, which coordinates the ranks: docs/relay.md, "Save with several ranks"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

from keepstep.checkpoint.places.location import AtRelay
from keepstep.checkpoint.places.relay_link import RelayLink
from keepstep.checkpoint.places.target import Exchanged, SaveFacts
from keepstep.checkpoint.reading import Fill, StoredManifest
from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Refusal
from keepstep.state.errors import (
    AFTER_GOING_BACK,
    CheckpointAborted,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    TransferError,
)
from keepstep.state.pack import Pack, manifest_of
from keepstep.transfer.relayed.relay_client import RelayCheckpoint, put_chunk
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Envelope,
    Origin,
    chunk_digest,
    chunk_length,
    read_envelope,
)
from keepstep_mesh.threads.starting import ThreadPoolExecutor

T = TypeVar("T")

STREAMS = 4
WAIT_SECONDS = 20
"""Longest wait of one request at the relay."""
FAIL_SECONDS = 5.0
MAX_LOSSES = 10
"""Restarts of the relay that one request outlives."""
NOT_FOUND, CONFLICT, GONE = 404, 409, 410
LOST = frozenset({NOT_FOUND})
INCOMPLETE = frozenset({NOT_FOUND, CONFLICT})
"""Answers to a chunk and to a result after a restart of the relay: the upload, the manifest, or a chunk is missing."""

log = get_logger("keepstep.checkpoint")


class RelayTarget:
    """Saves the part of one rank. See ``CheckpointTarget``."""

    def __init__(self, location: AtRelay, facts: SaveFacts, deadline: Deadline, token: str | None) -> None:
        self._location = location
        self._facts = facts
        self._token = token
        self._link = RelayLink(location, deadline, token)
        self._layout = b""
        self._stored: Callable[[], None]
        self._ended = False
        """The relay has told this rank that the upload ended, by another rank or its timeout."""

    def begin(self) -> None:
        """See ``CheckpointTarget``."""
        if self._begin() == "committed":
            raise CheckpointError(
                f"{self._location} is committed already, and a committed checkpoint never changes: use another id. "
                f"{AFTER_GOING_BACK} (keepstep checkpoint rm)"
            )

    def _begin(self) -> str:
        facts = self._facts
        body = {"id": self._location.id, "step": facts.step, "kind": facts.kind, "ranks": facts.world_size}
        return str(self._ask("POST", f"{self._link.all_path}?rank={facts.rank}", body).get("state"))

    def exchange(self, layout: bytes) -> Exchanged:
        """See ``CheckpointTarget``."""
        self._layout = layout
        return self._again(lambda: self._exchange(layout))

    def _exchange(self, layout: bytes) -> Exchanged:
        rank, own = self._facts.rank, chunk_digest(layout)
        digests: list[Any] = []
        while not digests or None in digests:
            if not digests or digests[rank] is None:  # or the relay has restarted
                self._put(f"{self._link.path}/layout?rank={rank}", layout)
            digests = list(self._wait("layouts")["digests"])
        different = {digest: number for number, digest in enumerate(dict.fromkeys(map(bytes.fromhex, digests)))}
        layouts = tuple(layout if digest == own else self._get_layout(digest) for digest in different)
        return Exchanged(layouts, tuple(different[bytes.fromhex(digest)] for digest in digests))

    def _get_layout(self, digest: bytes) -> bytes:
        target = f"{self._link.path}/layouts/{digest.hex()}"
        try:
            layout = _get(self._link, target, MAX_MANIFEST_BYTES)
        except Refusal as refusal:
            self._explain(refusal)  # not found: the relay has restarted
        if chunk_digest(layout) != digest:
            raise CheckpointError(f"the relay sent a layout that does not match its digest {digest.hex()}")
        return layout

    def store(self, pack: Pack) -> None:
        """See ``CheckpointTarget``."""
        facts = self._facts
        hasher = pack.digests()
        origin = Origin(self._location.id, self._location.job, facts.step, 0, facts.producer)
        manifest = manifest_of(pack, hasher, origin, facts.rank)
        self._stored = partial(self._upload, pack, hasher.chunk_digests, manifest)
        self._again(self._stored)

    def commit(self) -> None:
        """See ``CheckpointTarget``."""
        while (answer := self._again(lambda: self._wait("state"), self._stored))["state"] != "committed":
            self._link.deadline.remaining()
            if answer["layout_wanted"]:  # the relay has restarted, as below
                self._again(lambda: self._put(f"{self._link.path}/layout?rank={self._facts.rank}", self._layout))
            if not answer["reported"]:
                self._again(self._stored)

    def _upload(self, pack: Pack, digests: list[bytes], manifest: bytes) -> None:
        rank, root = self._facts.rank, read_envelope(manifest).root.hex()
        plan = {"rank": rank, "producer": self._facts.producer, "root": root}
        answer = self._ask("POST", f"{self._link.path}/plan", plan)
        if not answer["agrees"]:
            raise CheckpointError(
                f"rank {rank} of {self._location} has another state already, of a process that ended or of another "
                f"save: abort it, wait until it expires (--upload-timeout), or use another id"
            )
        if not answer["has_manifest"]:
            answer = self._put(f"{self._link.path}/manifest?rank={rank}", manifest)
        while missing := _positions(answer["lacks"]):
            self._put_chunks(pack, {digests[number]: number for number in missing})
            answer = self._ask("POST", f"{self._link.path}/plan", plan)
        try:
            self._ask("POST", f"{self._link.path}/result", {"rank": rank}, lost=INCOMPLETE)
        except CheckpointAborted:
            self._wait("state")  # raises, unless it was committed and dropped since: an answer of the relay was lost

    def _put_chunks(self, pack: Pack, chunks: dict[bytes, int]) -> None:
        def put(digest: bytes, number: int) -> None:
            data = pack.chunk(number)
            self._link.ask(lambda connection: put_chunk(connection, digest, data))

        with ThreadPoolExecutor(min(STREAMS, len(chunks)), "keepstep-save") as pool:
            running = [pool.submit(put, *one) for one in chunks.items()]
            try:
                for one in running:
                    one.result()
            except Refusal as refusal:
                if refusal.status == CONFLICT:  # the relay has no manifest that names the chunk
                    self._wait("state")  # raises if the upload ended
                self._explain(refusal, INCOMPLETE)  # another rank has begun it again
            finally:
                pool.shutdown(cancel_futures=True)

    def fail(self, error: str) -> None:
        """See ``CheckpointTarget``."""
        if self._ended:  # the others know; a quick one may have begun the next attempt already
            return
        self._link.close()  # its connections have the deadline of the save, which may have passed
        self._link.deadline = Deadline(FAIL_SECONDS, "the failure did not reach the relay")
        try:
            self._tell(error[:1000].encode(errors="backslashreplace").decode() or "unknown error")
        except CheckpointAborted:
            pass
        except (CheckpointError, TransferError, BrokenConnection) as problem:
            log.warning("the failure did not reach the other ranks", reason=str(problem))

    def _tell(self, error: str) -> None:
        rank, location = self._facts.rank, self._location
        try:
            self._ask("POST", f"{self._link.path}/result", {"rank": rank, "error": error})
        except _LostError:  # the relay has restarted, and the others begin again
            self._begin()
            one = RelayCheckpoint(location.job, location.id, rank, self._facts.producer)
            self._link.ask(lambda connection: one.abort(connection, f"rank {rank} failed: {error}"))

    def close(self) -> None:
        """See ``CheckpointTarget``."""
        self._stored = lambda: None  # it holds the pack, and this object: a cycle
        self._link.close()

    # ---- requests

    def _wait(self, what: str) -> dict[str, Any]:
        """Return the answer of the relay about the other ranks, after a wait."""
        seconds = min(WAIT_SECONDS, self._link.deadline.remaining() / 2)
        return self._ask("GET", f"{self._link.path}/{what}?rank={self._facts.rank}&wait={seconds:.3f}")

    def _ask(self, method: str, target: str, plain: object = None, *, lost: frozenset[int] = LOST) -> dict[str, Any]:
        try:
            return self._link.ask(lambda connection: connection.ask_json(method, target, plain))
        except Refusal as refusal:
            self._explain(refusal, lost)

    def _put(self, target: str, data: bytes) -> dict[str, Any]:
        try:
            return self._link.ask(lambda connection: connection.ask_json("PUT", target, raw=data))
        except Refusal as refusal:
            self._explain(refusal)

    def _again(self, request: Callable[[], T], after: Callable[[], object] = lambda: None) -> T:
        """Return what ``request`` returns. If the relay has lost the upload, begin again, and do ``after``."""
        losses = 0
        while True:
            try:
                return request()
            except _LostError as error:
                losses += 1
                if losses > MAX_LOSSES:
                    raise CheckpointError(
                        f"{self._location} was not saved: the relay lost the upload {losses} times, perhaps because it "
                        f"is older than this build ({error}): update the relay"
                    ) from error
                log.warning("the relay lost the upload; beginning again", checkpoint=str(self._location))
                self._link.deadline.remaining()
                self._begin()
                self._again(after)

    def _explain(self, refusal: Refusal, lost: frozenset[int] = LOST) -> NoReturn:
        if refusal.status in lost:
            raise _LostError(str(refusal)) from refusal
        if refusal.status == GONE:
            self._ended = True
            raise CheckpointAborted(f"{self._location} was aborted: {refusal}") from refusal
        raise CheckpointError(f"{self._location} was not saved: {refusal}") from refusal


class _LostError(CheckpointError):
    """The relay does not have the upload, or the part of this rank: it has restarted."""


class RelaySource:
    """Reads a committed checkpoint. See ``PackSource``.

    Args:
        location: the checkpoint.
        deadline: of the whole load.
        token: see ``RelayLink``.
    """

    def __init__(self, location: AtRelay, deadline: Deadline, token: str | None) -> None:
        self._location = location
        self._link = RelayLink(location, deadline, token)
        self._envelopes: list[Envelope] = []

    def manifests(self) -> list[StoredManifest]:
        """See ``PackSource``."""
        facts = self._get_json(self._link.path)["checkpoint"]
        if facts["state"] != "committed":
            raise CheckpointNotFound(f"{self._location} is not committed: its state is {facts['state']}")

        def manifest(rank: int) -> bytes:
            with self._explained():
                return _get(self._link, f"{self._link.path}/manifest?rank={rank}", MAX_MANIFEST_BYTES)

        with ThreadPoolExecutor(STREAMS, "keepstep-load") as pool:
            found = list(pool.map(manifest, range(facts["ranks"])))
        try:
            self._envelopes = [read_envelope(one) for one in found]
        except ManifestError as error:
            raise CheckpointDamaged(f"a manifest of {self._location} is damaged: {error}") from error
        self._link.close()  # until the first read
        return [StoredManifest(*one) for one in zip(found, self._envelopes, strict=True)]

    def _get_json(self, target: str) -> dict[str, Any]:
        with self._explained():
            return self._link.ask(lambda connection: connection.ask_json("GET", target))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            kind = CheckpointNotFound if refusal.status in (NOT_FOUND, GONE) else CheckpointError
            raise kind(f"{self._location} cannot be read: {refusal}") from refusal

    def fetch(self, rank: int, offset: int, length: int, receive: Callable[[Fill], None]) -> None:
        """See ``PackSource``."""
        envelope, chunk = self._envelopes[rank], offset // CHUNK_BYTES
        if length == chunk_length(envelope.pack_bytes, chunk):
            target, line = f"/v1/chunks/{envelope.chunk_digests[chunk].hex()}", ""
        else:
            target, line = f"{self._link.path}/packs/{rank}", f"Range: bytes={offset}-{offset + length - 1}\r\n"

        def ask(connection: Connection) -> None:
            _, found = connection.ask("GET", target, line)
            if found != length:
                raise TransferError(f"the relay sent {found} bytes of {self.name(rank)}, expected {length}")
            receive(connection.read_into)

        try:
            self._link.ask(ask)
        except Refusal as refusal:
            raise CheckpointDamaged(f"chunk {chunk} of {self.name(rank)} cannot be read: {refusal}") from refusal

    def name(self, rank: int) -> str:
        """See ``PackSource``."""
        return f"rank {rank} of {self._location}"

    def close(self) -> None:
        """See ``PackSource``."""
        self._link.close()


def _get(link: RelayLink, target: str, limit: int) -> bytes:
    def receive(connection: Connection) -> bytes:
        _, length = connection.ask("GET", target)
        if length > limit:
            raise TransferError(f"answer to GET {target} too large: {length} bytes (limit {limit})")
        return bytes(connection.read(length))

    return link.ask(receive)


def _positions(bitmap: str) -> list[int]:
    """Return the positions of the set bits of a bitmap in hex."""
    value = int.from_bytes(bytes.fromhex(bitmap), "little")
    return [number for number in range(value.bit_length()) if value >> number & 1]
