"""The durable tier: a copy of each committed durable checkpoint at a URL of fsspec. Blocking; called from threads.

    URL/JOB/ID/chunks/ab..., URL/JOB/ID/manifest-N, URL/JOB/ID/record

Each checkpoint has its own folder with its own chunks, so that a deletion needs no look at the others. ``record`` is
written last: a folder without a record is no checkpoint. Other files are not the relay's: it does not delete them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from keepstep_mesh.config.disk_space import FULL, write_failure
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import chunk_digest
from keepstep_relay.core.events import Key
from keepstep_relay.tiers.disk_tier import (
    BAD_DISK,
    CHUNK_NAME,
    MANIFEST_NAME,
    DamagedError,
    Record,
    decode_record,
    encode_record,
)

OWN_FILE = re.compile(rf"record|{MANIFEST_NAME.pattern}|chunks/{CHUNK_NAME.pattern}", re.ASCII)
"""Paths of the relay's files in the folder of a checkpoint."""
MAX_NAMED = 10
"""Number of files of others that a log line names."""

log = get_logger("keepstep.relay.durable")


class DurableError(KeepstepError):
    """The durable tier failed."""


class DurableTier:
    """Usable after ``open``. ``url``: ``file:///path``, ``s3://bucket/path`` ..."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._files: Any = None
        """The file system of fsspec; None: not open."""
        self._path = ""
        self._is_folder = False
        self.unreadable = set[Key]()
        """Checkpoints whose record or manifest is damaged."""

    def open(self) -> None:
        """Find the file system. Raises ``DurableError`` if fsspec cannot open the URL."""
        try:
            import fsspec.implementations.local  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise DurableError("--durable needs fsspec: pip install 'keepstep[durable]'") from error
        try:
            files, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise DurableError(f"--durable {self.url}: {error}") from error
        self._files = files
        self._is_folder = isinstance(files, fsspec.implementations.local.LocalFileSystem)
        self._path = str(path).rstrip("/")

    def write_chunk(self, key: Key, digest: bytes, data: memoryview) -> None:
        """Write a chunk, unless it is already there."""
        path = self._chunk(key, digest)
        if not self._do(path, lambda: self._files.exists(path) and self._files.size(path) == data.nbytes):
            self._write(path, data)

    def commit(self, key: Key, record: Record, manifests: dict[int, bytes]) -> None:
        for rank, manifest in manifests.items():
            self._write(f"{self._of(key)}/manifest-{rank}", memoryview(manifest))
        self._write(f"{self._of(key)}/record", memoryview(encode_record(key, record)))

    def read(self, keys: Iterable[Key], digest: bytes, length: int) -> memoryview:
        """Return the verified chunk of any of ``keys``.

        Raises:
            DamagedError: the chunk is missing or damaged in each of them.
            DurableError: the durable tier failed, and may have it.
        """
        failed: KeepstepError | None = None
        damaged = DamagedError(f"missing chunk {digest.hex()} in the durable tier")
        for key in keys:
            path = self._chunk(key, digest)
            try:
                data: bytes = self._do(path, lambda path=path: self._files.cat_file(path))  # type: ignore[misc]
            except DurableError as error:
                if self._is_damage(error.__cause__):
                    damaged = DamagedError(f"cannot read chunk {digest.hex()} in the durable tier: {error}")
                elif not isinstance(error.__cause__, FileNotFoundError):
                    failed = error
                continue
            if len(data) == length and chunk_digest(data) == digest:
                return memoryview(data)
            damaged = DamagedError(f"damaged chunk {digest.hex()} in {path}")
        raise failed or damaged

    def _is_damage(self, error: BaseException | None) -> bool:
        """Whether a read failed because of the disk below a folder. Clients of object stores use the same errors."""
        return self._is_folder and isinstance(error, OSError) and error.errno in BAD_DISK

    def lengths(self, key: Key) -> dict[bytes, int]:
        """Return the length of each chunk of a checkpoint that is there, by digest. Raises ``DurableError``."""
        folder = f"{self._of(key)}/chunks"

        def look() -> list[dict[str, Any]]:
            return list(self._files.ls(folder, detail=True)) if self._files.exists(folder) else []

        found: dict[bytes, int] = {}
        for one in self._do(folder, look):
            name = one["name"].rsplit("/", 1)[1]
            if one["type"] == "file" and CHUNK_NAME.fullmatch(name):
                found[bytes.fromhex(name)] = int(one["size"])
        return found

    def load(self) -> Iterator[tuple[Key, Record, dict[int, bytes]]]:
        """Iterate over the complete checkpoints. An unreadable checkpoint is logged and skipped."""
        for path in sorted(self._do(self.url, lambda: self._files.glob(f"{self._path}/*/*/record"))):
            folder = str(path).rsplit("/", 1)[0]
            try:
                key, record = decode_record(self._files.cat_file(path))
                names = [f"{folder}/manifest-{rank}" for rank in range(record.facts.ranks)]
                manifests = {rank: self._files.cat_file(name) for rank, name in enumerate(names)}
            except (OSError, ValueError) as error:
                log.error("skipped an unreadable checkpoint in the durable tier", path=folder, reason=str(error))
                self.unreadable.add(Key(*folder.rsplit("/", 2)[1:]))
                continue
            if not folder.endswith(f"/{key.job}/{key.id}"):
                log.error("skipped a checkpoint in the durable tier: its folder has another name", path=folder)
                self.unreadable.add(Key(*folder.rsplit("/", 2)[1:]))
                continue
            yield key, record, manifests

    def forget(self, key: Key) -> None:
        """Delete a checkpoint, its record first. Leave and log files that are not the relay's."""
        folder = self._of(key)

        def delete() -> list[str]:
            if self._files.exists(f"{folder}/record"):
                self._files.rm_file(f"{folder}/record")
            self._files.invalidate_cache(folder)
            names = [str(path).removeprefix(f"{folder}/") for path in self._files.find(folder)]
            if own := [f"{folder}/{name}" for name in names if OWN_FILE.fullmatch(name)]:
                self._files.rm(own)
            for emptied in (f"{folder}/chunks", folder):
                with contextlib.suppress(OSError, NotImplementedError):  # not empty, or a store without folders
                    self._files.rmdir(emptied)
            return [name for name in names if not OWN_FILE.fullmatch(name)]

        if left := self._do(folder, delete):
            facts = {"path": folder, "files": left[:MAX_NAMED], "count": len(left)}
            log.warning("left files in the durable tier that are not the relay's", **facts)

    def _write(self, path: str, data: memoryview) -> None:
        def write() -> None:
            self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            with self._files.open(path, "wb") as file:
                file.write(data)

        self._do(path, write)

    def _do(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # every file system of fsspec has errors of its own
            reason = repr(error)
            if isinstance(error, OSError) and error.errno in FULL:
                reason = write_failure(error, Path(what))
            raise DurableError(f"{what}: {reason}") from error

    def _chunk(self, key: Key, digest: bytes) -> str:
        return f"{self._of(key)}/chunks/{digest.hex()}"

    def _of(self, key: Key) -> str:
        return f"{self._path}/{key.job}/{key.id}"
