"""Files at a relay, in folders that are committed as a whole: one checkpoint, with a rank for each file.

A file is an upload of two ranks until then. Rank 0 has its bytes. Rank 1 never reports, so the relay does not commit
the file alone. The process that wrote the file gives signs of life of both ranks: if it ends, the relay drops the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from keepstep.checkpoint.places.at_relay import RelayTarget
from keepstep.checkpoint.places.location import AtRelay
from keepstep.checkpoint.places.relay_link import RelayLink
from keepstep.checkpoint.places.target import SaveFacts
from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Refusal
from keepstep.state.errors import CheckpointDamaged, CheckpointError, TransferError
from keepstep.state.pack import Pack
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Envelope,
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

log = get_logger("keepstep.checkpoint")


@dataclass(frozen=True)
class FileAtRelay:
    """A file that can be read."""

    name: str
    size: int
    is_committed: bool
    at: AtRelay
    envelope: Envelope


class RelayFiles:
    """The files of one job at a relay. Safe to use from several threads.

    Args:
        address: of the relay, ``http://host:port``.
        job: name of the job.
        kind: ``durable`` or ``live``: of the checkpoints that commits make.
        timeout: time limit of one call.
        token: token for the relay. None: that of the environment.
    """

    def __init__(self, address: str, job: str, *, kind: str, timeout: timedelta, token: str | None) -> None:
        self._address = address
        self._job = job
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
        self._store(upload, SaveFacts(0, 2, 0, "live", self._producer), _Bytes(name, data))
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
        for rank, one in enumerate(files):
            facts = SaveFacts(rank, len(files), step, self._kind, self._producer)
            self._store(destination, facts, _Moved(one))
        self._ask("POST", destination, "/commit")  # a relay that has restarted since then knows no reports
        for one in files:
            self._abort(one.at.id, f"committed in {destination}")

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
            self._send("DELETE", folder, "")
            return
        for one in self.files(folder).values():
            self._abort(one.at.id, "removed")

    def chunk(self, one: FileAtRelay, number: int) -> memoryview:
        """Return a chunk of a file. Raises ``CheckpointDamaged``, ``OSError``."""
        digest = one.envelope.chunk_digests[number]
        data = memoryview(bytearray(chunk_length(one.envelope.pack_bytes, number)))

        def receive(connection: Connection) -> None:
            _, length = connection.ask("GET", f"/v1/chunks/{digest.hex()}")
            if length != data.nbytes:
                raise TransferError(f"the relay sent a chunk of {length} bytes, expected {data.nbytes}")
            connection.read_into(data)

        self._request(one.at.id, lambda link: link.ask(receive))
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

    def _store(self, upload: str, facts: SaveFacts, pack: _Bytes | _Moved) -> None:
        target = RelayTarget(self._at(upload), facts, self._deadline(), self._token)
        try:
            target.begin()
            try:
                target.store(cast("Pack", pack))
            except BaseException as error:
                target.fail(f"{type(error).__name__}: {error}")
                raise
        except CheckpointError as error:
            raise OSError(errno.EIO, str(error)) from error
        finally:
            target.close()

    def _committed(self, folder: str) -> int | None:
        """Return the number of files of a committed folder; None: it is not committed."""
        self._upload_id(folder, "")
        with suppress(FileNotFoundError):
            facts = self._ask("GET", folder, "")["checkpoint"]
            if facts["state"] == "committed":
                return int(facts["ranks"])
        return None

    def _uploads(self) -> list[dict[str, Any]]:
        link = self._link("all")
        try:
            return list(link.ask(lambda one: one.ask_json("GET", link.all_path))["checkpoints"])
        finally:
            link.close()

    def _file(self, upload: str, rank: int, *, is_committed: bool) -> FileAtRelay | None:
        """Return a file; None: it has been removed, or its manifest is not here yet."""

        def receive(connection: Connection) -> bytes:
            _, length = connection.ask("GET", f"{link_path}/manifest?rank={rank}")
            if length > MAX_MANIFEST_BYTES:
                raise TransferError(f"manifest too large: {length} bytes (limit {MAX_MANIFEST_BYTES})")
            return bytes(connection.read(length))

        link_path = self._link(upload).path
        try:
            data = self._request(upload, lambda link: link.ask(receive))
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
            self._send("POST", upload, "/abort", {"reason": reason})

    def _send(self, method: str, upload: str, below: str, body: object = None) -> None:
        """Send a request whose answer has no body."""

        def send(connection: Connection) -> None:
            kind = "Content-Type: application/json\r\n"
            _, length = connection.ask(method, f"{path}{below}", kind, body=json.dumps(body).encode())
            connection.read(length)

        path = self._link(upload).path
        self._request(upload, lambda link: link.ask(send))

    def _ask(self, method: str, upload: str, below: str, body: object = None) -> dict[str, Any]:
        answer: dict[str, Any] = self._request(
            upload, lambda link: link.ask(lambda one: one.ask_json(method, f"{link.path}{below}", body))
        )
        return answer

    def _request(self, upload: str, request: Any) -> Any:
        link = self._link(upload)
        try:
            return request(link)
        except Refusal as refusal:
            if refusal.status in (404, 410):
                raise FileNotFoundError(errno.ENOENT, f"{self._at(upload)} not found: {refusal}") from refusal
            kind = PermissionError if refusal.status in (401, 403) else OSError
            raise kind(errno.EACCES if kind is PermissionError else errno.EIO, str(refusal)) from refusal
        finally:
            link.close()

    def _at(self, upload: str) -> AtRelay:
        return AtRelay(self._address, self._job, upload)

    def _deadline(self) -> Deadline:
        return Deadline(self._seconds, f"no answer of the relay {self._address}")

    def _link(self, upload: str) -> RelayLink:
        return RelayLink(self._at(upload), self._deadline(), self._token)

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
                    for rank in range(2):  # rank 0 too: a relay that has restarted waits for its report again
                        self._ask("GET", upload, f"/state?rank={rank}")
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


class _Bytes:
    """The bytes of a file, as the pack of a rank."""

    def __init__(self, name: str, data: memoryview) -> None:
        self._data = data
        self.content_bytes = _content(name, data.nbytes)

    def digests(self) -> PackHasher:
        hasher = PackHasher(self._data.nbytes)
        for number in range(chunk_count(self._data.nbytes)):
            hasher.add(self.chunk(number))
        return hasher

    def chunk(self, number: int) -> memoryview:
        return self._data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


@dataclass(frozen=True)
class _Hashed:
    """The digests of a file that the relay has. See ``PackHasher``."""

    chunk_digests: list[bytes]
    parts: Parts


class _Moved:
    """A file that the relay has, under its name in another checkpoint."""

    def __init__(self, file: FileAtRelay) -> None:
        self._file = file
        self.content_bytes = _content(file.name, file.size)

    def digests(self) -> _Hashed:
        return _Hashed(list(self._file.envelope.chunk_digests), self._file.envelope.parts)

    def chunk(self, number: int) -> memoryview:
        raise CheckpointDamaged(f"the relay has lost chunk {number} of {self._file.name}: write the file again")


def _content(name: str, size: int) -> bytes:
    tree = ["dict", "file", name, "data", ["tensor", 0]]
    return pack_content(Content(tree, (TensorEntry(BYTES, (size,), None, 0, 0),), (size,)))


def files_below(files: Mapping[str, FileAtRelay], folder: str) -> set[str]:
    """Return the names directly below ``folder``, which is empty or ends with a slash."""
    return {name[len(folder) :].partition("/")[0] for name in files if name.startswith(folder)}
