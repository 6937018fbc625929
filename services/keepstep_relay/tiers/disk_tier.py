"""The disk tier: a file per chunk and a folder per checkpoint in one data directory. Blocking; called from threads.

    chunks/ab/abcd...              a chunk, named by its digest
    checkpoints/JOB/ID/record      JSON: its properties, and when it was committed; written last
    checkpoints/JOB/ID/manifest-N  manifest of rank N
    partial/                       files that are being written

A file gets its name when it is complete. A commit syncs everything that it needs; chunks of a durable checkpoint are
synced when they are written, so that little is left for it. Files and folders
with other names are not the relay's: it neither reads nor deletes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep_mesh.config.disk_space import FULL, write_failure
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import DIGEST_BYTES, chunk_digest
from keepstep_relay.core.events import Facts, Key, Kind

CHUNK_NAME = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}", re.ASCII)
MANIFEST_NAME = re.compile(r"manifest-\d+", re.ASCII)

BAD_DISK = frozenset((errno.EIO, errno.EREMOTEIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ))
"""Errors of a read that a bad disk causes: file systems and drivers use different ones for the same."""

log = get_logger("keepstep.relay.disk")


class DiskError(KeepstepError):
    """The disk failed. ``full``: no space left."""

    def __init__(self, what: str, error: OSError, folder: Path) -> None:
        self.full = error.errno in FULL
        advice = ", or remove checkpoints" if self.full else "; check the disk"
        super().__init__(f"{what}: {write_failure(error, folder)}{advice}")


class DamagedError(KeepstepError):
    """A chunk is missing, or its digest is wrong."""


class UnreadableError(DamagedError):
    """The disk has a chunk and cannot read it. Its file stays: a disk that comes back may read it again."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record of a checkpoint in a tier; times are Unix seconds."""

    facts: Facts
    begun: float
    committed: float | None = None


def encode_record(key: Key, record: Record) -> bytes:
    facts = record.facts
    plain = {"version": 1, "job": key.job, "id": key.id, "step": facts.step, "kind": facts.kind.value}
    plain |= {"ranks": facts.ranks, "quorum_id": facts.quorum_id, "one_producer": facts.one_producer}
    plain |= {"begun": record.begun, "committed": record.committed}
    if facts.stays_open:
        plain["open"] = True
    return json.dumps(plain).encode()


def decode_record(text: bytes) -> tuple[Key, Record]:
    """Return the checkpoint and its record. Raises ``ValueError`` for a damaged record."""
    plain: dict[str, Any] = json.loads(text)
    try:
        if plain["version"] != 1:
            raise ValueError(f"version {plain['version']}")
        facts = Facts(
            *(int(plain["step"]), Kind(plain["kind"]), int(plain["ranks"]), int(plain["quorum_id"])),
            one_producer=bool(plain.get("one_producer")),  # absent in records of earlier versions
            stays_open=bool(plain.get("open")),
        )
        return Key(plain["job"], plain["id"]), Record(facts, plain["begun"], plain["committed"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"damaged record: {error!r}") from error


class DiskTier:
    """Usable between ``open`` and ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chunks, self._checkpoints, self._partial = (
            folder / name for name in ("chunks", "checkpoints", "partial")
        )
        self._numbers = itertools.count()
        self.unreadable = set[Key]()
        """Checkpoints whose record or manifest is unreadable: their chunks are unknown and must not be deleted."""
        self._lock: int | None = None
        """Descriptor of the lock file while the tier is open."""

    def open(self) -> None:
        """Create the folder, and lock it for this process.

        Raises ``DiskError`` if the folder cannot be used, ``KeepstepError`` if another relay uses it.
        """
        folder = self.folder
        with _explained(f"cannot use the data directory {folder}", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (self._chunks, self._checkpoints, self._partial):
                path.mkdir(parents=True, exist_ok=True)
            for number in range(256):
                (self._chunks / f"{number:02x}").mkdir(exist_ok=True)
            lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise KeepstepError(f"another relay uses {folder}; give each relay its own --data-dir") from error
        self._lock = lock
        with _explained(f"cannot use the data directory {folder}", folder):
            for left in self._partial.iterdir():
                if left.name.isdecimal() and left.is_file():
                    left.unlink()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def try_write(self, size: int) -> None:
        """Write a file of ``size`` bytes, and delete it. Raises ``DiskError``."""
        partial = self._partial / "tried"
        with _explained(f"cannot write to {self.folder}", self.folder):
            try:
                partial.write_bytes(bytes(size))
            finally:
                partial.unlink(missing_ok=True)

    # ---- chunks

    def write(self, digest: bytes, data: memoryview, sync: bool) -> None:
        """Write a chunk; ``sync``: its bytes to the device, too. Raises ``DiskError``; then no file is left."""
        with _explained(f"cannot write chunk {digest.hex()} to {self.folder}", self.folder):
            self._place(data, self._file(digest), sync=sync)

    def read(self, digest: bytes, data: memoryview) -> None:
        """Read a chunk into ``data`` and verify it. Raises ``DamagedError`` or ``DiskError``."""
        length = data.nbytes
        try:
            with self._file(digest).open("rb", buffering=0) as file:
                done = 0
                while done < length and (more := file.readinto(data[done:])):
                    done += more
                longer = bool(file.read(1))
        except FileNotFoundError as error:
            raise DamagedError(f"missing file of chunk {digest.hex()}") from error
        except OSError as error:
            if error.errno in BAD_DISK:
                raise UnreadableError(f"cannot read the file of chunk {digest.hex()}: {error}") from error
            raise DiskError(f"cannot read chunk {digest.hex()}", error, self.folder) from error
        if done < length or longer or chunk_digest(data) != digest:
            raise DamagedError(f"damaged file of chunk {digest.hex()}")

    def delete(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):
                self._file(digest).unlink()

    def found(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over the chunk files: (digest, length)."""
        for number in range(256):
            for entry in os.scandir(self._chunks / f"{number:02x}"):
                if CHUNK_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    digest = bytes.fromhex(entry.name)
                    if digest[0] == number:
                        yield digest, entry.stat().st_size

    def sync(self, digests: Iterable[bytes]) -> None:
        """Write these chunks and their names through to the device, so that they survive a power cut."""
        with _explained(f"cannot sync chunks to {self.folder}", self.folder):
            folders = set()
            for digest in digests:
                _sync(self._file(digest))
                folders.add(self._file(digest).parent)
            for folder in (*folders, self._chunks):
                _sync(folder)

    def _file(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._chunks / name[:2] / name

    # ---- checkpoints

    def begin(self, key: Key, record: Record) -> None:
        """Write the record of a new checkpoint, and delete the files of an earlier one with its name."""
        self.forget(key)
        with _explained(f"cannot write {key}", self.folder):
            with contextlib.suppress(FileNotFoundError):  # a deletion may remove the folder of the job in between
                self._of(key).mkdir(parents=True, exist_ok=True)
            self._of(key).mkdir(parents=True, exist_ok=True)
            self._place(encode_record(key, record), self._of(key) / "record", sync=False)

    def put_manifest(self, key: Key, rank: int, manifest: bytes) -> None:
        with _explained(f"cannot write the manifest of rank {rank} of {key}", self.folder):
            self._place(manifest, self._of(key) / f"manifest-{rank}", sync=False)

    def commit(self, key: Key, record: Record) -> None:
        """Write the record of the commit, and sync everything but the chunks. Raises ``DiskError``."""
        folder = self._of(key)
        with _explained(f"cannot commit {key}", self.folder):
            for rank in range(record.facts.ranks):
                _sync(folder / f"manifest-{rank}")
            _sync(folder)
            self._place(encode_record(key, record), folder / "record", sync=True)
            for path in (folder, folder.parent, self._checkpoints):
                _sync(path)

    def forget(self, key: Key) -> None:
        """Delete a checkpoint. The record is deleted first: a folder without a record is no checkpoint."""
        with _explained(f"cannot delete {key}", self.folder):
            with contextlib.suppress(FileNotFoundError):
                (self._of(key) / "record").unlink()
            _delete_rest(self._of(key))

    def load(self) -> Iterator[tuple[Key, Record, dict[int, bytes]]]:
        """Iterate over the checkpoints and the manifests that they have. Delete the rest of those without a record."""
        for folder in sorted(self._checkpoints.glob("*/*")):
            if not folder.is_dir():
                continue
            try:
                key, record = decode_record((folder / "record").read_bytes())
                if self._of(key) != folder:
                    raise ValueError("its folder has another name")
                files = {rank: folder / f"manifest-{rank}" for rank in range(record.facts.ranks)}
                yield key, record, {rank: file.read_bytes() for rank, file in files.items() if file.exists()}
            except FileNotFoundError:
                if _delete_rest(folder):
                    log.info("deleted the rest of a checkpoint", folder=str(folder))
            except (OSError, ValueError) as error:
                self.unreadable.add(Key(folder.parent.name, folder.name))
                log.error("could not read a checkpoint; its files stay", folder=str(folder), reason=str(error))

    def _of(self, key: Key) -> Path:
        return self._checkpoints / key.job / key.id

    def _place(self, data: bytes | memoryview, path: Path, *, sync: bool) -> None:
        partial = self._partial / str(next(self._numbers))
        try:
            with partial.open("wb", buffering=0) as file:
                if sync:
                    _bypass_cache(file.fileno(), True)
                rest = memoryview(data)
                while rest:
                    try:
                        rest = rest[file.write(rest) :]
                    except OSError as error:
                        if error.errno != errno.EINVAL or not _bypass_cache(file.fileno(), False):
                            raise
                if sync:
                    os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _explained(what: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(what, error, folder) from error


def _delete_rest(folder: Path) -> bool:
    """Delete the manifests of a checkpoint without a record, and its folder, if nothing else is in it.

    Returns:
        Whether the folder is gone.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if MANIFEST_NAME.fullmatch(path.name) and path.is_file():
                path.unlink()
        folder.rmdir()
        with contextlib.suppress(OSError):
            folder.parent.rmdir()
    return not folder.exists()


def _bypass_cache(descriptor: int, wanted: bool) -> bool:
    """Write to the device from the memory of the caller, or not. Return whether this changed anything.

    The copy into the cache of the system takes most of the processor time of a save. For a write past the cache, the
    kernel may require aligned memory and a length of whole blocks. It answers ``EINVAL`` if they are not given.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, changed)
    except OSError:  # this file system always uses the cache
        return False
    return changed != flags


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
