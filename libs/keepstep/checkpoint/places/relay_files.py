"""Files at a relay, in folders that are committed as a whole: one checkpoint, with a rank for each file.

A file is an open upload until then, which the relay never commits. The process that wrote the file gives signs of life
of it: if it ends, the relay drops the file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Refusal
from keepstep.relay_client.relay_link import RelayLink, is_absent, link_to
from keepstep.relay_client.relay_paths import CHECKPOINTS_URL, AtRelay
from keepstep.relay_client.relay_requests import RelayCheckpoint, ask_chunk, list_checkpoints
from keepstep.relay_client.uploading import STREAMS, Packed, RelayUpload
from keepstep.state.errors import CheckpointDamaged, CheckpointError, TransferError, TransferTimeout
from keepstep.state.state_manifest import build_manifest
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.manifest import (
    CHUNK_BYTES,
    Envelope,
    Origin,
    PackHasher,
    Parts,
    chunk_count,
    chunk_digest,
    chunk_length,
    read_envelope,
)
from keepstep_mesh.protocol.state_content import BYTES, Content, TensorEntry, pack_content, unpack_content
from keepstep_mesh.threads.starting import Thread

LEASE_SECONDS = 10.0
"""Between two signs of life of an open file. The relay drops it after ``--upload-timeout`` without one."""
_OPEN = "open-"
"""Begins the names of uploads of open files, which no folder may have."""
_STEP = re.compile(r"\d+$")

T = TypeVar("T")

log = get_logger("keepstep.checkpoint")


@dataclass(frozen=True)
class FileAtRelay:
    """A file that can be read."""

    name: str
    size: int
    is_committed: bool
    at: AtRelay
    envelope: Envelope

    def lost_chunk(self, number: int) -> memoryview:
        """Raise ``CheckpointDamaged``: the relay does not have the chunk any more."""
        raise CheckpointDamaged(f"the relay has lost chunk {number} of {self.name}: write the file again")


class RelayFiles:
    """The files of one job at a relay. Safe to use from several threads.

    Args:
        url: of the checkpoints of a job, ``http://HOST:PORT/v1/jobs/JOB/checkpoints``.
        kind: ``durable`` or ``live``: of the checkpoints that commits make.
        timeout: time limit of one call.
        token: token for the relay. None: that of the environment.

    Raises:
        CheckpointError: the url is invalid.
    """

    def __init__(self, url: str, *, kind: str, timeout: timedelta, token: str | None) -> None:
        try:
            at = AtRelay.parse(f"{url.rstrip('/')}/any")
        except ValueError as error:
            raise CheckpointError(f"invalid url {url!r}: {error}; expected {CHECKPOINTS_URL}") from error
        if at is None:
            raise CheckpointError(f"invalid url {url!r}: expected {CHECKPOINTS_URL}")
        self._address, self._job = at.address, at.job
        self._kind = kind
        self._seconds = timeout.total_seconds()
        self._token = token
        self._producer = f"{socket.gethostname()}:{os.getpid()}"
        self._lock = threading.Lock()
        self._leases: set[str] = set()
        """Ids of the uploads that this process keeps alive."""
        self._wake = threading.Event()
        self._thread: Thread | None = None

    def write(self, folder: str, name: str, data: memoryview) -> None:
        """Write or replace a file of an open folder. Raises ``OSError``."""
        if self._committed(folder) is not None:
            raise PermissionError(errno.EROFS, f"{folder} is committed, and a committed checkpoint never changes")
        upload = self._upload_id(folder, name)
        self._abort(upload, "replaced by a newer file")
        hasher = PackHasher(data.nbytes)
        for number in range(chunk_count(data.nbytes)):
            hasher.add((_chunk(data, number),))
        one = self._checkpoint(upload)
        manifest = self._manifest(one, name, data.nbytes, hasher.digests, hasher.parts)
        self._store(one, {"step": 0, "kind": "live", "open": True}, manifest, lambda number: _chunk(data, number))
        with self._lock:
            self._leases.add(upload)
            if self._thread is None:
                thread = Thread(target=self._keep_alive, name="keepstep-relay-files", daemon=True)
                thread.start()
                self._thread = thread

    def files(self, folder: str) -> dict[str, FileAtRelay]:
        """Return the files of a folder by name; empty: it does not exist. Raises ``OSError``."""
        ranks = self._committed(folder)
        if ranks is not None:
            found = [self._file(folder, rank, is_committed=True) for rank in range(ranks)]
        else:
            prefix = self._upload_id(folder, "").rpartition("-")[0]
            uploads = [one["id"] for one in self._uploads() if one["id"].startswith(prefix)]
            found = [self._file(upload, 0, is_committed=False) for upload in uploads]
        return {one.name: one for one in found if one is not None}

    def folders(self) -> list[str]:
        """Return the names of the committed folders."""
        return [one["id"] for one in self._uploads() if one["state"] == "committed" and not one["id"].startswith(_OPEN)]

    def commit(self, source: str, destination: str, step: int | None = None) -> None:
        """Commit the files of ``source`` as ``destination``. Raises ``OSError``, also if that has files already.

        Args:
            source: an open folder.
            destination: name of the checkpoint.
            step: of the training. None: the number at the end of ``destination``, else 0.
        """
        files = sorted(self.files(source).values(), key=lambda one: one.name)
        if not files or files[0].is_committed:
            raise FileNotFoundError(errno.ENOENT, f"{source} has no open files at {self._address}")
        if self.files(destination):
            raise FileExistsError(errno.ENOTEMPTY, f"{destination} has files already: remove it, or use another name")
        if step is None:
            step = int(found[0]) if (found := _STEP.search(destination)) else 0
        facts = {"step": step, "kind": self._kind, "ranks": len(files)}
        for rank, file in enumerate(files):
            one, envelope = self._checkpoint(destination, rank), file.envelope
            manifest = self._manifest(one, file.name, file.size, b"".join(envelope.chunk_digests), envelope.parts)
            self._store(one, facts, manifest, file.lost_chunk)
        self._ask(destination, self._checkpoint(destination).commit)  # a relay that restarted since knows no reports
        for file in files:
            self._abort(file.at.id, f"committed in {destination}")

    def remove_file(self, folder: str, name: str) -> None:
        """Remove a file of an open folder. Raises ``OSError``."""
        one = self.files(folder).get(name)
        if one is None:
            raise FileNotFoundError(errno.ENOENT, f"{folder}/{name} not found at {self._address}")
        if one.is_committed:
            raise PermissionError(errno.EROFS, f"{folder} is committed, and a committed checkpoint never changes")
        self._abort(one.at.id, "removed")

    def remove(self, folder: str) -> None:
        """Remove a folder. The relay wants an admin token for one that is committed. Raises ``OSError``."""
        if self._committed(folder) is not None:
            self._ask(folder, self._checkpoint(folder).remove)
            return
        for one in self.files(folder).values():
            self._abort(one.at.id, "removed")

    def chunk(self, one: FileAtRelay, number: int) -> memoryview:
        """Return a chunk of a file. Raises ``CheckpointDamaged``, ``OSError``."""
        digest = one.envelope.chunk_digests[number]
        data = memoryview(bytearray(chunk_length(one.envelope.pack_bytes, number)))

        def receive(connection: Connection) -> None:
            ask_chunk(connection, digest, data.nbytes)
            connection.read_into(data)

        self._ask(one.at.id, receive)
        if chunk_digest(data) != digest:
            raise CheckpointDamaged(f"chunk {number} of {one.name} of {one.at} is damaged")
        return data

    # ---- requests

    def _upload_id(self, folder: str, name: str) -> str:
        if folder.startswith(_OPEN) or names.problem(folder, "checkpoint"):
            raise OSError(
                errno.EINVAL,
                f"invalid folder {folder[:80]!r}: expected 1-128 characters of [A-Za-z0-9._-], not {_OPEN}...",
            )
        of_folder, of_name = (hashlib.blake2b(one.encode(), digest_size=16).hexdigest() for one in (folder, name))
        return f"{_OPEN}{of_folder}-{of_name}"

    def _manifest(self, one: RelayCheckpoint, name: str, size: int, digests: bytes, parts: Parts) -> bytes:
        tree = ["dict", "file", name, "data", ["tensor", 0]]
        content = pack_content(Content(tree, (TensorEntry(BYTES, (size,), None, 0, 0),), (size,)))
        return build_manifest(Origin(one.id, one.job, 0, 0, self._producer), content, digests, parts)

    def _store(
        self, one: RelayCheckpoint, facts: Mapping[str, Any], manifest: bytes, chunk: Callable[[int], memoryview]
    ) -> None:
        packed = Packed(manifest, read_envelope(manifest), chunk)

        def store(link: RelayLink) -> None:
            upload = RelayUpload(link, one, facts, streams=STREAMS)
            try:
                upload.send(packed)
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}"
                with suppress(TransferError, BrokenConnection):
                    link.ask(lambda connection: one.abort(connection, reason))
                raise

        self._linked(one.id, store)

    def _committed(self, folder: str) -> int | None:
        """Return the number of files of a committed folder; None: it is not committed."""
        self._upload_id(folder, "")
        with suppress(FileNotFoundError):
            facts = self._ask(folder, self._checkpoint(folder).show)
            if facts["state"] == "committed":
                return int(facts["ranks"])
        return None

    def _uploads(self) -> list[dict[str, Any]]:
        return list(self._ask("all", lambda connection: list_checkpoints(connection, self._job))["checkpoints"])

    def _file(self, upload: str, rank: int, *, is_committed: bool) -> FileAtRelay | None:
        """Return a file; None: it has been removed, or its manifest is not here yet."""
        try:
            data = self._ask(upload, lambda connection: self._checkpoint(upload).manifest(connection, rank))
            envelope = read_envelope(data)
            match unpack_content(envelope.content_bytes).tree:
                case ["dict", "file", str(name), "data", ["tensor", 0]]:
                    return FileAtRelay(name, envelope.pack_bytes, is_committed, self._at(upload), envelope)
        except FileNotFoundError:
            return None
        except ManifestError as error:
            raise OSError(errno.EIO, f"{self._at(upload)} has an invalid manifest: {error}") from error
        raise OSError(errno.EINVAL, f"{self._at(upload)} is not a folder of files: read it with keepstep.checkpoint")

    def _abort(self, upload: str, reason: str) -> None:
        with self._lock:
            self._leases.discard(upload)
            if not self._leases:
                self._wake.set()  # the thread ends
        with suppress(FileNotFoundError):
            self._ask(upload, lambda connection: self._checkpoint(upload).abort(connection, reason))

    def _ask(self, upload: str, request: Callable[[Connection], T]) -> T:
        return self._linked(upload, lambda link: link.ask(request))

    def _linked(self, upload: str, work: Callable[[RelayLink], T]) -> T:
        at = self._at(upload)
        link = link_to(at, Deadline(self._seconds, f"no answer of the relay {self._address}"), self._token)
        try:
            return work(link)
        except Refusal as refusal:
            if is_absent(refusal):
                raise FileNotFoundError(errno.ENOENT, f"{at} not found: {refusal}") from refusal
            kind = PermissionError if refusal.status in (401, 403) else OSError
            raise kind(errno.EACCES if kind is PermissionError else errno.EIO, str(refusal)) from refusal
        except TransferTimeout:
            raise
        except (TransferError, CheckpointDamaged) as error:
            raise OSError(errno.EIO, f"{at}: {error}") from error
        finally:
            link.close()

    def _at(self, upload: str) -> AtRelay:
        return AtRelay(self._address, self._job, upload)

    def _checkpoint(self, upload: str, rank: int = 0) -> RelayCheckpoint:
        return RelayCheckpoint(self._job, upload, rank, self._producer)

    # ---- leases

    def _keep_alive(self) -> None:
        while True:
            self._wake.wait(LEASE_SECONDS)
            self._wake.clear()
            with self._lock:
                uploads = list(self._leases)
                if not uploads:
                    self._thread = None
                    return
            for upload in uploads:
                try:
                    self._ask(upload, self._checkpoint(upload).state)
                except FileNotFoundError:
                    with self._lock:
                        self._leases.discard(upload)  # committed by another rank, or removed
                except (OSError, TransferError, BrokenConnection) as error:
                    log.warning("no sign of life of a file reached the relay", upload=upload, reason=str(error))

    def close(self) -> None:
        """Give no more signs of life of open files."""
        with self._lock:
            self._leases.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join()


def _chunk(data: memoryview, number: int) -> memoryview:
    return data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def files_below(files: Mapping[str, FileAtRelay], folder: str) -> set[str]:
    """Return the names directly below ``folder``, which is empty or ends with a slash."""
    return {name[len(folder) :].partition("/")[0] for name in files if name.startswith(folder)}
