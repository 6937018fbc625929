"""Checkpoints in a directory that all ranks see: ``manifest-N`` and ``pack-N`` for each rank, and ``checkpoint.json``.

Each save writes its files under names of its own (``pack-N.ATTEMPT.partial``). ``checkpoint.json`` names the attempt,
and is created by one save only: a directory without it has no checkpoint. Then the files get their names. A reader
opens them under either name. Ranks of one save find each other through ``RankFiles``. A save that overwrites replaces
``checkpoint.json``: the earlier checkpoint is whole until then. ``checkpoint.json.lock`` keeps such a save from a place
where another one gives files their names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from keepstep.checkpoint.places.durable_files import (
    create_whole,
    make_folder,
    remove_folders,
    sync_folder,
    write_file,
    write_whole,
)
from keepstep.checkpoint.places.pack_file import write_pack
from keepstep.checkpoint.places.rank_files import OLD_SECONDS, RankFiles, identity, read_json
from keepstep.checkpoint.places.target import Exchanged, SaveFacts
from keepstep.checkpoint.reading import Fill, StoredManifest
from keepstep.connection.deadline import Deadline
from keepstep.state.errors import (
    AFTER_GOING_BACK,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
)
from keepstep.state.pack import Pack
from keepstep.state.state_manifest import build_manifest
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import Origin, read_envelope

RECORD = "checkpoint.json"
LOCK = f"{RECORD}.lock"
_POLL_SECONDS = 0.02
FORMAT = "keepstep-checkpoint"
VERSION = 1
_LEFT = re.compile(r"(?:manifest|pack)-(\d+)|(?:manifest-\d+|pack-\d+|checkpoint\.json)\.[0-9a-f]+\.partial")
_ATTEMPT = re.compile(r"[0-9a-f]+")

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
        self._ranks = RankFiles(path, facts, deadline, self._check_uncommitted) if facts.world_size > 1 else None
        self._own_attempt = secrets.token_hex(16)
        self._root = ""
        self._replaces: object = None
        """Attempt of the checkpoint that is overwritten."""
        self._new_folders: list[Path] = []
        """Those that ``begin`` has made, the innermost first."""

    @property
    def _attempt(self) -> str:
        """Name of this attempt: equal at all ranks, after the exchange."""
        return (self._ranks.attempt if self._ranks else "") or self._own_attempt

    def begin(self) -> None:
        """See ``CheckpointTarget``."""
        with self._explained():
            if self._facts.overwrite:
                self._replaces = self._stored_attempt()
            self._check_uncommitted()
            self._new_folders = self._ranks.begin() if self._ranks else make_folder(self._path)

    def _check_uncommitted(self) -> None:
        """Raise ``CheckpointError`` if another save has committed a checkpoint."""
        stored = self._stored_attempt()  # once: rank 0 may commit at any moment
        if stored not in (None, self._attempt, self._replaces):
            record = read_record(self._path)
            saved = (
                f"of step {record.get('step')}, saved by {record.get('producer', 'an unknown process')} at "
                f"{record.get('committed')}"
            )
            if self._facts.overwrite:
                raise CheckpointError(
                    f"{self._path} has a checkpoint that another save has committed since this one began, which is not "
                    f"overwritten: {saved}; let one save end before the next one to the same directory begins"
                )
            raise CheckpointError(
                f"Checkpoint already exists: {self._path} has a committed one, which is not overwritten: {saved}; save "
                f"to another directory, or pass overwrite=True. {AFTER_GOING_BACK}"
            )

    def exchange(self, layout: bytes) -> Exchanged:
        """See ``CheckpointTarget``."""
        assert self._ranks is not None, "a single rank exchanges nothing"
        with self._explained():
            return self._ranks.exchange(layout)

    def store(self, pack: Pack) -> None:
        """See ``CheckpointTarget``."""
        rank = self._facts.rank
        with self._explained():
            path, sync = self._path / partial_name(f"pack-{rank}", self._attempt), self._facts.sync
            hasher = write_pack(pack, path, self._deadline.remaining, sync=sync)
            manifest = build_manifest(self._origin(), pack.content_bytes, hasher.digests, hasher.parts)
            write_file(self._path / partial_name(f"manifest-{rank}", self._attempt), manifest, sync=sync)
            if sync:
                sync_folder(self._path)
            self._check_uncommitted()
            self._root = read_envelope(manifest).root.hex()
            if self._ranks:
                self._ranks.report(self._root)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:  # an OSError too
            raise
        except OSError as error:
            raise CheckpointError(
                f"{self._path} was not saved: {error.strerror or error}; earlier checkpoints are intact: free space "
                f"there, or save to another directory"
            ) from error

    def commit(self) -> None:
        """See ``CheckpointTarget``."""
        if self._ranks is None:
            self._commit([self._root])
        elif self._facts.rank == 0:
            self._commit(self._ranks.roots())
        else:
            self._ranks.wait_for_commit(self._is_committed)

    def _is_committed(self) -> bool:
        return self._stored_attempt() == self._attempt

    def _stored_attempt(self) -> str | None:
        """Return the attempt that was committed. Empty: ``checkpoint.json`` is damaged. None: it is absent."""
        if not (self._path / RECORD).exists():
            return None
        try:
            return str(read_record(self._path).get("attempt", ""))
        except CheckpointDamaged:
            return ""

    def _origin(self) -> Origin:
        return Origin(self._path.name, "", self._facts.step, 0, self._facts.producer)

    def _commit(self, roots: list[str]) -> None:
        """Write ``checkpoint.json``, which only one of several saves can, and then give the files their names."""
        record = {
            "format": FORMAT,
            "version": VERSION,
            "step": self._facts.step,
            "ranks": len(roots),
            "roots": roots,
            "committed": datetime.now(UTC).isoformat(timespec="seconds"),
            "attempt": self._attempt,
            "producer": self._facts.producer,
        }
        names = [f"{kind}-{rank}" for rank in range(len(roots)) for kind in ("manifest", "pack")]
        with self._explained():
            self._check_uncommitted()
            data = json.dumps(record, indent=1).encode()
            self._lock()
            try:
                self._write_record(data, names)
            except BaseException:
                self._unlock()
                raise
        try:
            for name in names:
                (self._path / partial_name(name, self._attempt)).replace(self._path / name)
            if self._facts.sync:
                sync_folder(self._path)
            if self._ranks:
                self._ranks.wait_for_others()
            self._tidy(len(roots))
        except OSError as error:  # it is committed, and readers find the files under both names
            log.warning("files of a committed checkpoint not renamed", path=str(self._path), reason=str(error))
            self._unlock()

    def _write_record(self, data: bytes, names: list[str]) -> None:
        if self._replaces is None:
            if not create_whole(self._path / RECORD, data, sync=self._facts.sync):
                self._check_uncommitted()
                raise CheckpointError(f"{self._path} was not saved: {RECORD} is in the way; save to another directory")
            return
        self._check_uncommitted()
        for name in names:
            if not (self._path / partial_name(name, self._attempt)).exists():
                raise CheckpointError(f"{self._path} was not saved: another save there has deleted {name}; save again")
        write_whole(self._path / RECORD, data, sync=self._facts.sync)

    def _lock(self) -> None:
        """Keep saves that overwrite from this place. If this is one, wait for the end of another save first.

        A lock that stays as it is for ``OLD_SECONDS`` is of a process that was killed.
        """
        lock, seen, since = self._path / LOCK, None, time.monotonic()
        while True:
            try:
                lock.touch(exist_ok=self._replaces is None)
            except FileExistsError:
                found = identity(lock)
                if found is None or found != seen:
                    seen, since = found, time.monotonic()
                elif time.monotonic() - since > OLD_SECONDS:
                    lock.unlink(missing_ok=True)
                time.sleep(min(_POLL_SECONDS, self._deadline.remaining()))  # a shared file system announces nothing
            else:
                return

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            (self._path / LOCK).unlink(missing_ok=True)

    def _tidy(self, ranks: int) -> None:
        """Delete what attempts left that were killed, perhaps with more ranks, or were late."""
        for file in self._path.iterdir():
            old = _LEFT.fullmatch(file.name)
            if old is not None and (old[1] is None or int(old[1]) >= ranks):
                file.unlink(missing_ok=True)
        self._unlock()
        shutil.rmtree(self._path / ".saving", ignore_errors=True)  # now the other ranks return

    def fail(self, error: str) -> None:
        """See ``CheckpointTarget``."""
        with contextlib.suppress(OSError, CheckpointError):
            if not self._is_committed():
                self._delete_partial()
        if self._ranks:
            self._ranks.fail(error)
            return
        remove_folders(self._new_folders)

    def _delete_partial(self) -> None:
        """Delete the files of this rank, unless rank 0 may commit them. Rank 0 deletes those of all ranks."""
        rank = self._facts.rank
        if rank and self._ranks and self._ranks.may_be_committed:
            return
        for one in (rank,) if rank else range(self._facts.world_size):
            for kind in ("manifest", "pack"):
                (self._path / partial_name(f"{kind}-{one}", self._attempt)).unlink(missing_ok=True)

    def close(self) -> None:
        """See ``CheckpointTarget``."""


def partial_name(name: str, attempt: str) -> str:
    """Return the name of a file until its checkpoint is committed, and a moment longer."""
    return f"{name}.{attempt}.partial"


_IMPORT = "; keepstep checkpoint import reads the files of other programs"


class DirectorySource:
    """Reads a committed checkpoint. See ``PackSource``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._attempt = ""

    def manifests(self) -> list[StoredManifest]:
        """See ``PackSource``."""
        return [self.manifest(rank, root) for rank, root in enumerate(self.record()["roots"])]

    def record(self) -> dict[str, Any]:
        """Return ``checkpoint.json``.

        Raises:
            CheckpointNotFound: the directory has no checkpoint.
            CheckpointDamaged: the file does not name the root of each rank.
            CheckpointError: it is of another version.
        """
        if self._path.is_file():
            raise CheckpointNotFound(
                f"{self._path} is a file, expected a directory of keepstep.checkpoint.save{_IMPORT}"
            )
        record = read_record(self._path)
        if not record:
            is_foreign = any(next(self._path.glob(name), None) for name in (".metadata", "*.safetensors*"))
            hint = _IMPORT if is_foreign else ""
            raise CheckpointNotFound(f"{self._path} has no committed checkpoint: missing {RECORD}{hint}")
        if record.get("format") != FORMAT or record.get("version") != VERSION:
            raise CheckpointError(
                f"{self._path / RECORD} is of format {record.get('format')!r}, version {record.get('version')!r}; this "
                f"build reads {FORMAT!r}, version {VERSION}"
            )
        attempt = str(record.get("attempt"))
        self._attempt = attempt if _ATTEMPT.fullmatch(attempt) else ""
        roots = record.get("roots")
        if not isinstance(roots, list) or len(roots) != record.get("ranks") or not roots:
            raise CheckpointDamaged(f"{self._path / RECORD} is damaged: it must name the root of each rank")
        return record

    def manifest(self, rank: int, root: str) -> StoredManifest:
        """Return the manifest of a rank. ``CheckpointDamaged`` if it has not this root, or its pack not its length."""
        name = f"manifest-{rank}"
        with self._open(name) as file:
            data = file.read()
        try:
            envelope = read_envelope(data)
        except ManifestError as error:
            raise CheckpointDamaged(f"{self._path / name} is damaged: {error}") from error
        if envelope.root.hex() != root:
            raise CheckpointDamaged(f"{self._path / name} is not the committed manifest")
        self._check_size(rank, envelope.pack_bytes)
        return StoredManifest(data, envelope)

    def _check_size(self, rank: int, size: int) -> None:
        with self._open(f"pack-{rank}") as file:
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise CheckpointDamaged(f"{self._path / f'pack-{rank}'} has {found} bytes, expected {size}")

    def _open(self, name: str) -> FileIO:
        """Open a file, which may still have the name of its attempt. Raises ``CheckpointDamaged`` if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            return (self._path / partial_name(name, self._attempt)).open("rb", buffering=0)
        try:
            return (self._path / name).open("rb", buffering=0)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self._path / name} is missing") from None

    def fetch(self, rank: int, offset: int, length: int, receive: Callable[[Fill], None]) -> None:
        """See ``PackSource``. Memory-mapped files would be read a page fault at a time."""
        del length

        def fill(memory: memoryview) -> None:
            while memory:
                size = file.readinto(memory)
                if not size:
                    raise CheckpointDamaged(f"{self.name(rank)} was truncated")
                memory = memory[size:]

        with self._open(f"pack-{rank}") as file:
            file.seek(offset)
            receive(fill)

    def name(self, rank: int) -> str:
        """See ``PackSource``."""
        return str(self._path / f"pack-{rank}")

    def close(self) -> None:
        """See ``PackSource``."""


def read_record(path: Path) -> dict[str, Any]:
    """Return the ``checkpoint.json`` of a directory; empty: it is absent. Raises ``CheckpointDamaged``."""
    try:
        return read_json(path / RECORD)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(
            f"{error}; load another checkpoint, or save to {path} again with overwrite=True"
        ) from error
