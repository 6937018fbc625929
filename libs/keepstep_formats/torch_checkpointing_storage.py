"""Storage of Meta's torch_checkpointing at a relay, which verifies every byte. Needs the package torch_checkpointing.

A checkpoint is a folder of files. torch_checkpointing writes them into ``tmp_step-100``, and renames that to
``step-100``: the rename commits one checkpoint at the relay, whole or not at all.
"""

from __future__ import annotations

import errno
import io
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from keepstep.checkpoint.places.relay_files import FileAtRelay, RelayFiles, files_below
from keepstep_mesh.protocol.manifest import CHUNK_BYTES

__all__ = ["RelayStorage", "RelayStorageConfig"]


@dataclass
class RelayStorageConfig(StorageConfig):  # type: ignore[misc]  # its package has no types where it is not installed
    """Settings of ``RelayStorage``. They may travel to the process that torch_checkpointing starts.

    Attributes:
        url: ``http://RELAY:29520/v1/jobs/JOB/checkpoints``.
        folder: paths of checkpoints are below it, such as ``/checkpoints`` for ``/checkpoints/step-100``. Default: a
            path is the name of a checkpoint, such as ``step-100``.
        kind: ``"durable"``, or ``"live"``: the relay may drop it when newer ones exist, and may have it in memory only.
        timeout_seconds: time limit of one call.
        token: token for the relay. Default: that of the environment.
    """

    url: str
    folder: str = "."
    kind: str = "durable"
    timeout_seconds: float = 600.0
    token: str | None = None

    def create_storage(self) -> RelayStorage:
        """Return the storage."""
        return RelayStorage(self)


class RelayStorage(Storage):  # type: ignore[misc]
    """Files of torch_checkpointing at a relay. Errors are those of files: ``OSError`` and its subclasses.

    Args:
        config: the relay.
    """

    def __init__(self, config: RelayStorageConfig) -> None:
        self._url = config.url.rstrip("/")
        self._folder = PurePosixPath(config.folder)
        timeout = timedelta(seconds=config.timeout_seconds)
        self._files = RelayFiles(config.url, kind=config.kind, timeout=timeout, token=config.token)

    # ---- files

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Return a stream of a file. A chunk is read, and verified, when the stream reaches it."""
        del read_args
        return _Reading(self._files, self._existing(path))

    def stream_write(self, path: Path) -> io.IOBase:
        """Return a stream that writes the file when it is closed, from memory. After an error it writes nothing."""
        return _Writing(self, path)

    def write(self, path: Path, data: Any) -> None:
        """Write a whole file."""
        folder, name = self._split(path)
        self._files.write(folder, name, memoryview(data).cast("B"))

    def delete(self, path: Path) -> None:
        """Remove a file that is not committed."""
        self._files.remove_file(*self._split(path))

    def getsize(self, path: Path) -> int:
        """Return the bytes of a file."""
        return self._existing(path).size

    # ---- folders

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Do nothing: a folder exists as long as it has files."""

    def rmdir(self, path: Path) -> None:
        """Remove a folder with its files. Removing a committed one needs an admin token."""
        folder, name = self._parts(path)
        if not name:
            self._files.remove(folder)
            return
        for one in self._files.files(folder):
            if one.startswith(f"{name}/"):
                self._files.remove_file(folder, one)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit the folder ``src_path`` as the checkpoint ``dst_path``; or rename a file that is not committed."""
        del is_directory, background_cleanup
        (source, name), (target, new_name) = self._parts(src_path), self._parts(dst_path)
        if not name and not new_name:
            self._files.commit(source, target)
            return
        if self.isdir(src_path) or self.isdir(dst_path):
            raise FileExistsError(errno.EISDIR, f"cannot rename {src_path} to {dst_path}: only checkpoints are renamed")
        data = self.read(src_path)
        self.write(dst_path, data)
        self.delete(src_path)

    def ls(self, path: Path) -> list[str]:
        """Return the names in a folder."""
        if PurePosixPath(path) == self._folder:
            return sorted(self._files.folders())
        folder, name = self._parts(path)
        found = files_below(self._files.files(folder), f"{name}/" if name else "")
        if not found:
            raise FileNotFoundError(errno.ENOENT, f"{path} not found at {self._url}")
        return sorted(found)

    def exists(self, path: Path) -> bool:
        """Return whether a file or folder exists."""
        if PurePosixPath(path) == self._folder:
            return True
        folder, name = self._parts(path)
        files = self._files.files(folder)
        return any(not name or one == name or one.startswith(f"{name}/") for one in files)

    def isdir(self, path: Path) -> bool:
        """Return whether a folder exists."""
        if PurePosixPath(path) == self._folder:
            return True
        folder, name = self._parts(path)
        return bool(files_below(self._files.files(folder), f"{name}/" if name else ""))

    def remap_path(self, path: Path) -> str:
        """Return the URL of a path."""
        return f"{self._url}/{PurePosixPath(path).relative_to(self._folder)}"

    def close(self) -> None:
        """Let the relay drop files that are not committed."""
        self._files.close()

    # ---- paths

    def _parts(self, path: Path) -> tuple[str, str]:
        """Return the checkpoint of a path, and the name below it; empty: the checkpoint itself."""
        try:
            checkpoint, *below = PurePosixPath(path).relative_to(self._folder).parts
        except ValueError:
            raise OSError(errno.EINVAL, f"invalid path {path}: expected a checkpoint below {self._folder}") from None
        return checkpoint, "/".join(below)

    def _split(self, path: Path) -> tuple[str, str]:
        folder, name = self._parts(path)
        if not name:
            raise IsADirectoryError(errno.EISDIR, f"{path} is a checkpoint, expected a file below it")
        return folder, name

    def _existing(self, path: Path) -> FileAtRelay:
        folder, name = self._split(path)
        found = self._files.files(folder).get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, f"{path} not found at {self._url}")
        return found


class _Reading(io.RawIOBase):
    def __init__(self, files: RelayFiles, file: FileAtRelay) -> None:
        self._files = files
        self._file = file
        self._at = 0
        self._chunk: tuple[int, memoryview] = (-1, memoryview(b""))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        target, done = memoryview(buffer).cast("B"), 0
        while done < target.nbytes and self._at < self._file.size:
            number, start = divmod(self._at, CHUNK_BYTES)
            if self._chunk[0] != number:
                self._chunk = (number, self._files.chunk(self._file, number))
            part = self._chunk[1][start : start + target.nbytes - done]
            target[done : done + part.nbytes] = part
            done += part.nbytes
            self._at += part.nbytes
        return done

    def readall(self) -> bytes:
        data = bytearray(max(0, self._file.size - self._at))
        self.readinto(data)
        return bytes(data)


class _Writing(io.BytesIO):
    def __init__(self, storage: RelayStorage, path: Path) -> None:
        super().__init__()
        self._storage = storage
        self._path = path

    def close(self) -> None:
        if not self.closed:
            try:
                self._storage.write(self._path, self.getvalue())
            finally:
                super().close()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            super().close()
