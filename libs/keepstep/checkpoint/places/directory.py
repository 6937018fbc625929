"""Checkpoints in a directory that all ranks see: ``manifest-N`` and ``pack-N`` for each rank, ``checkpoint.json`` last.

A directory without ``checkpoint.json`` has no checkpoint. Ranks that save exchange small files in ``.saving``:

* ``layout-N``: what rank N holds, after 16 random bytes that name its process; or ``failed-N``, its error.
* ``seen-N``: digest of all layouts as rank N read them. Files of an earlier attempt may be there; when the ``seen`` of
  all ranks are equal, all have read the layouts of this attempt, because each of them has its own random bytes.
* ``result-N``: JSON with the digest, and the root of the manifest, or the error of rank N. Rank 0 reads all of them and
  writes ``checkpoint.json``, or ``aborted`` with the reason.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepstep.checkpoint.errors import CheckpointAborted, CheckpointDamaged, CheckpointError, CheckpointNotFound
from keepstep.checkpoint.parts.pack import Pack
from keepstep.checkpoint.places.durable_files import make_folder, sync_folder, write_file, write_whole
from keepstep.checkpoint.places.target import Exchanged, SaveFacts
from keepstep.checkpointing.direct.connection import Deadline
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Origin,
    chunk_digest,
    pack_envelope,
    read_envelope,
)

RECORD = "checkpoint.json"
FORMAT = "keepstep-checkpoint"
VERSION = 1
_SAVING = ".saving"
_NONCE_BYTES = 16
_POLL = Backoff(first=0.005, most=0.25)
MAX_MAPPED = 64
"""Packs that one load keeps open. Processes often may have 1024 files, and jobs more ranks."""
STALE_SECONDS = 5.0
"""After this time in the exchange, the error of another rank counts. Before, it may be that of an earlier attempt: the
rank deletes it when it begins."""
_OLD = re.compile(r"(?:manifest|pack)-(\d+)(\.[0-9a-f]+\.partial)?")

log = get_logger("keepstep.checkpoint")


class DirectoryTarget:
    """Saves the part of one rank. See ``CheckpointTarget``.

    Args:
        path: the directory.
        facts: the save.
        deadline: of the save.
    """

    def __init__(self, path: Path, facts: SaveFacts, deadline: Deadline) -> None:
        self._path = path
        self._facts = facts
        self._deadline = deadline
        self._saving = path / _SAVING
        self._attempt = secrets.token_hex(_NONCE_BYTES)
        """Equal at all ranks after the exchange."""
        self._root = ""
        self._new_folders: list[Path] = []
        """Those that ``begin`` has made, the innermost first."""

    def begin(self) -> None:
        """See ``CheckpointTarget``."""
        self._check_uncommitted()
        self._new_folders = make_folder(self._saving if self._facts.world_size > 1 else self._path)
        for name in ("failed", "layout"):
            (self._saving / f"{name}-{self._facts.rank}").unlink(missing_ok=True)

    def _check_uncommitted(self) -> None:
        if (self._path / RECORD).exists():
            raise CheckpointError(
                f"{self._path} has a committed checkpoint, which is never overwritten: save to another directory"
            )

    def exchange(self, layout: bytes) -> Exchanged:
        """See ``CheckpointTarget``."""
        saving, rank, ranks = self._saving, self._facts.rank, range(self._facts.world_size)
        write_whole(saving / f"layout-{rank}", secrets.token_bytes(_NONCE_BYTES) + layout)
        seen, began = b"", time.monotonic()

        def agreed() -> list[bytes] | None:
            nonlocal seen
            if time.monotonic() - began > STALE_SECONDS:
                self._check_failed()
            layouts = [_read(saving / f"layout-{one}") for one in ranks]
            found = [one for one in layouts if one is not None]
            if len(found) < len(layouts):
                return None
            digest = chunk_digest(b"".join(chunk_digest(one) for one in found))
            if digest != seen:
                seen = digest
                write_whole(saving / f"seen-{rank}", digest)
            return found if all(_read(saving / f"seen-{one}") == digest for one in ranks) else None

        found = self._wait(agreed, lambda: f"layouts of ranks {self._absent('seen', seen)}")
        self._attempt = seen.hex()
        layouts = [one[_NONCE_BYTES:] for one in found]
        different = {one: number for number, one in enumerate(dict.fromkeys(layouts))}
        return Exchanged(tuple(different), tuple(different[one] for one in layouts))

    def _check_failed(self) -> None:
        for rank in range(self._facts.world_size):
            if failed := _read(self._saving / f"failed-{rank}"):
                raise CheckpointAborted(f"the save to {self._path} was aborted: rank {rank} failed: {failed.decode()}")

    def _absent(self, name: str, content: bytes) -> str:
        saving = self._saving
        absent = [rank for rank in range(self._facts.world_size) if _read(saving / f"{name}-{rank}") != content]
        return ", ".join(map(str, absent[:10]))

    def store(self, pack: Pack) -> None:
        """See ``CheckpointTarget``."""
        rank = self._facts.rank
        partial_pack, partial_manifest = self._partial("pack"), self._partial("manifest")
        try:
            digests = self._write_pack(pack, partial_pack)
        except TimeoutError:  # an OSError too
            raise
        except OSError as error:
            raise CheckpointError(
                f"{self._path} was not saved: {error.strerror or error}; earlier checkpoints are intact: free space "
                f"there, or save to another directory"
            ) from error
        manifest = pack_envelope(self._origin(), pack.content_bytes, digests)
        if len(manifest) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"manifest of rank {rank} too large: {len(manifest)} bytes (limit {MAX_MANIFEST_BYTES})"
            )
        write_file(partial_manifest, manifest)
        self._check_uncommitted()  # by another save, since ``begin``
        partial_manifest.replace(self._path / f"manifest-{rank}")  # first: ``_commit`` compares it
        partial_pack.replace(self._path / f"pack-{rank}")
        sync_folder(self._path)
        self._root = read_envelope(manifest).root.hex()
        if self._facts.world_size > 1:
            _write_json(self._saving / f"result-{rank}", {"attempt": self._attempt, "root": self._root})

    def _partial(self, name: str) -> Path:
        """Return where this attempt writes a file of this rank. Another save to this directory writes elsewhere."""
        return self._path / f"{name}-{self._facts.rank}.{self._attempt}.partial"

    def _write_pack(self, pack: Pack, path: Path) -> bytes:
        """Write the pack durably, and return the digests of its chunks."""
        digests = bytearray()
        with path.open("wb") as file:
            for number in range(pack.chunks):
                self._deadline.remaining()
                chunk = pack.chunk(number)
                digests += chunk_digest(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return bytes(digests)

    def commit(self) -> None:
        """See ``CheckpointTarget``."""
        if self._facts.world_size == 1:
            self._commit([self._root])
        elif self._facts.rank == 0:
            self._commit_all()
        else:
            self._wait_for_commit()

    def _origin(self) -> Origin:
        return Origin(self._path.name, "", self._facts.step, 0, self._facts.producer)

    def _commit_all(self) -> None:
        saving, ranks = self._saving, range(self._facts.world_size)

        def results() -> list[dict[str, Any]] | None:
            found = [_read_json(saving / f"result-{rank}") for rank in ranks]
            for rank, one in enumerate(found):
                if one.get("attempt") == self._attempt and "error" in one:
                    raise CheckpointAborted(f"the save to {self._path} was aborted: rank {rank} failed: {one['error']}")
            return found if all(one.get("attempt") == self._attempt for one in found) else None

        def absent() -> str:
            found = (rank for rank in ranks if _read_json(saving / f"result-{rank}").get("attempt") != self._attempt)
            return "results of ranks " + ", ".join(map(str, found))

        self._commit([str(one["root"]) for one in self._wait(results, absent)])

    def _commit(self, roots: list[str]) -> None:
        self._check_uncommitted()
        for rank, root in enumerate(roots):
            manifest = _read(self._path / f"manifest-{rank}")
            if manifest is None or read_envelope(manifest).root.hex() != root:
                raise CheckpointError(
                    f"another save to {self._path} has replaced manifest-{rank}: save to a directory of its own"
                )
        record = {
            "format": FORMAT,
            "version": VERSION,
            "step": self._facts.step,
            "ranks": len(roots),
            "roots": roots,
            "committed": datetime.now(UTC).isoformat(timespec="seconds"),
            "attempt": self._attempt,
        }
        _write_json(self._path / RECORD, record)
        shutil.rmtree(self._saving, ignore_errors=True)
        with contextlib.suppress(OSError):  # it is committed, whatever is left
            for file in self._path.iterdir():
                old = _OLD.fullmatch(file.name)
                if old is not None and (old[2] or int(old[1]) >= len(roots)):
                    file.unlink(missing_ok=True)  # of an attempt that was killed, perhaps with more ranks

    def _wait_for_commit(self) -> None:
        def committed() -> bool | None:
            if _read_json(self._path / RECORD).get("attempt") == self._attempt:
                return True
            aborted = _read_json(self._saving / "aborted")
            if aborted.get("attempt") == self._attempt:
                raise CheckpointAborted(str(aborted.get("error")))
            return None

        self._wait(committed, lambda: "the commit of rank 0")

    def fail(self, error: str) -> None:
        """See ``CheckpointTarget``."""
        for partial in (self._partial("pack"), self._partial("manifest")):
            with contextlib.suppress(OSError):
                partial.unlink()
        if self._facts.world_size == 1:
            with contextlib.suppress(OSError):  # not empty, or of another save by now
                for folder in self._new_folders:
                    folder.rmdir()
            return
        name = "aborted" if self._facts.rank == 0 else f"result-{self._facts.rank}"
        try:
            write_whole(self._saving / f"failed-{self._facts.rank}", error.encode(errors="backslashreplace"))
            _write_json(self._saving / name, {"attempt": self._attempt, "error": error})
        except OSError as problem:
            log.warning("the failure did not reach the other ranks", reason=str(problem))

    def close(self) -> None:
        """See ``CheckpointTarget``."""

    def _wait(self, look: Callable[[], Any], missing: Callable[[], str]) -> Any:
        attempts = 0
        while (found := look()) is None:
            attempts += 1
            try:
                left = self._deadline.remaining()
            except TimeoutError as error:
                raise CheckpointAborted(f"{error}; missing in {self._path}: {missing()}") from error
            time.sleep(min(_POLL.seconds(attempts), left))  # a shared file system announces nothing
        return found


class DirectorySource:
    """Reads a committed checkpoint. See ``CheckpointReader``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: OrderedDict[int, mmap.mmap] = OrderedDict()
        """The packs that were read last. Each takes a file descriptor."""
        self._verified: dict[int, bytearray] = {}
        self._lock = threading.Lock()
        self._digests: list[tuple[bytes, ...]] = []

    def manifests(self) -> list[bytes]:
        """See ``CheckpointReader``."""
        record = _read_json(self._path / RECORD)
        if not record:
            raise CheckpointNotFound(f"{self._path} has no committed checkpoint: missing {RECORD}")
        if record.get("format") != FORMAT or record.get("version") != VERSION:
            raise CheckpointError(
                f"{self._path / RECORD} is of format {record.get('format')!r}, version {record.get('version')!r}; this "
                f"build reads {FORMAT!r}, version {VERSION}"
            )
        found: list[bytes] = []
        self._digests.clear()
        for rank, root in enumerate(_roots(record, self._path)):
            file = self._path / f"manifest-{rank}"
            data = _read(file)
            try:
                envelope = None if data is None else read_envelope(data)
            except ManifestError as error:
                raise CheckpointDamaged(f"{file} is damaged: {error}") from error
            if data is None or envelope is None or envelope.root.hex() != root:
                raise CheckpointDamaged(f"{file} is {'missing' if data is None else 'not the committed manifest'}")
            self._digests.append(envelope.chunk_digests)
            self._check_size(rank, envelope.pack_bytes)
            found.append(data)
        return found

    def _check_size(self, rank: int, size: int) -> None:
        path = self._path / f"pack-{rank}"
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointDamaged(f"{path} is missing") from None
        if found != size:
            raise CheckpointDamaged(f"{path} has {found} bytes, expected {size}")
        self._verified[rank] = bytearray(len(self._digests[rank]))

    def read(self, rank: int, offset: int, length: int) -> memoryview:
        """See ``CheckpointReader``."""
        if not length:
            return memoryview(b"")
        view, verified = memoryview(self._mapped(rank)), self._verified[rank]
        for chunk in range(offset // CHUNK_BYTES, (offset + length - 1) // CHUNK_BYTES + 1):
            if not verified[chunk]:
                part = view[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
                if chunk_digest(part) != self._digests[rank][chunk]:
                    raise CheckpointDamaged(f"chunk {chunk} of {self._path / f'pack-{rank}'} is damaged")
                verified[chunk] = 1
        return view[offset : offset + length]

    def _mapped(self, rank: int) -> mmap.mmap:
        with self._lock:
            found = self._files.get(rank)
            if found is None:
                with (self._path / f"pack-{rank}").open("rb") as file:
                    found = self._files[rank] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                while len(self._files) > MAX_MAPPED:
                    self._files.popitem(last=False)  # closed when its last view is gone
            self._files.move_to_end(rank)
            return found

    def close(self) -> None:
        """See ``CheckpointReader``."""
        for file in self._files.values():
            with contextlib.suppress(BufferError):  # a view of the caller keeps it open
                file.close()
        self._files.clear()


def _roots(record: dict[str, Any], path: Path) -> Iterable[str]:
    roots = record.get("roots")
    if not isinstance(roots, list) or len(roots) != record.get("ranks") or not roots:
        raise CheckpointDamaged(f"{path / RECORD} is damaged: it must name the root of each rank")
    return map(str, roots)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty: the file is absent."""
    data = _read(path)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}") from error
    if type(value) is not dict:
        raise CheckpointDamaged(f"{path} is damaged: it is not a JSON object")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, json.dumps(value, indent=1).encode())
