"""Conversion of checkpoints between keepstep and other programs. docs/interchange.md shows it in use.

Each call converts a whole state in this process, without a process group. docs/interchange.md says how much memory that
takes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.loading import open_reader
from keepstep.checkpoint.saving import save_unread
from keepstep.checkpoint.stored import StoredCheckpoint
from keepstep.state.errors import CheckpointError, UnsupportedValue
from keepstep.state.flattening import Leaf, build, flatten
from keepstep.state.pack import Unread
from keepstep.state.pack_layout import describe
from keepstep.state.values.known_classes import class_name
from keepstep.state.values.leaves import BITS, WITHOUT_COPY
from keepstep_formats.dcp_directory import DcpDirectory
from keepstep_formats.finished_output import check_free
from keepstep_formats.folders.known_folders import format_of, read_items, with_companions
from keepstep_formats.folders.safetensors_folders import find_safetensors, read_safetensors_files
from keepstep_formats.foreign_errors import CannotHold, ForeignCheckpointError, RefusedClass
from keepstep_formats.pickled_items import load_file, save_pickled, write_pickled
from keepstep_formats.safetensors_files import SUFFIX, write_safetensors
from keepstep_mesh.protocol.stored_keys import key_of
from keepstep_mesh.text import listed

__all__ = [
    "CannotHold",
    "Converted",
    "ForeignCheckpointError",
    "Format",
    "RefusedClass",
    "export_checkpoint",
    "import_checkpoint",
]

MAX_NAMED = 5
CONVERSION_TIMEOUT = timedelta(hours=1)

Progress = Callable[[str, int, int], None]
"""Receives what is done (``converting``, ``reading``, ``writing``), the bytes done, and those in all (0: not known)."""


class Format(StrEnum):
    """Formats of other programs."""

    DCP = "dcp"
    """A directory of torch.distributed.checkpoint."""
    TORCH = "torch"
    """A file of torch.save."""
    SAFETENSORS = "safetensors"
    """A safetensors file, or a folder with several and an index."""


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        format: the format of the other program.
        tensors: number of tensors.
        objects: number of other values.
        nbytes: bytes of the tensors.
        left_out: paths of the values that were left out.
    """

    format: Format
    tensors: int
    objects: int
    nbytes: int
    left_out: tuple[str, ...]


def export_checkpoint(
    checkpoint_id: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    form: Format | None = None,
    part: str = "",
    shard_bytes: int | None = None,
    skip_objects: bool = False,
    timeout: timedelta = CONVERSION_TIMEOUT,
    token: str | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write a committed checkpoint for another program. Every byte is verified. ``destination`` is complete or absent.

    Args:
        checkpoint_id: see ``keepstep.checkpoint.save``.
        destination: the new file or folder.
        form: its format. Default: torch for ``.pt``, ``.pth`` and ``.bin``, safetensors for ``.safetensors``, else DCP.
        part: export only the values below this key, such as ``model``, and without it in their keys.
        shard_bytes: for safetensors: write a folder with files of at most this size, and an index.
        skip_objects: leave out values that the format cannot hold. False: they are an error.
        timeout: time limit of the reads.
        token: token for the relay. Default: that of the environment.
        progress: see ``Progress``.

    Raises:
        CannotHold: the format cannot hold a value; the error names its path.
        CheckpointNotFound: the checkpoint does not exist, or is not committed.
        CheckpointDamaged: stored bytes are damaged.
        ForeignCheckpointError: ``destination`` exists.
    """
    path = Path(destination)
    progress = progress or _ignore
    form = form or _format_to_write(path, shard_bytes)
    if shard_bytes is not None and form is not Format.SAFETENSORS:
        raise CheckpointError(f"{form} files have no shards: leave the size of shards out, or export safetensors")
    check_free(path)  # before a long read
    reader = open_reader(checkpoint_id, timeout=timeout, token=token)
    try:
        exported = _Export(StoredCheckpoint(reader), part, form, skip_objects, progress)
        match form:
            case Format.SAFETENSORS:
                tensors = {key: leaf.value for key, leaf in exported.leaves.items()}
                write_safetensors(tensors, path, shard_bytes, read=exported.read)
            case Format.TORCH:
                _write_torch(exported, path)
            case Format.DCP:
                from keepstep_formats.dcp_writing import write_dcp_directory  # noqa: PLC0415  slow import

                exported.left_out += write_dcp_directory(build(exported.leaves), path, exported.read)
    finally:
        reader.close()
    return _converted(form, exported.leaves, exported.left_out)


def _write_torch(exported: _Export, path: Path) -> None:
    """Write a file of torch.save. Memory of the tensors is reserved, but none of it is used."""
    described = [leaf for leaf in exported.leaves.values() if exported.is_described(leaf.value)]
    places = [torch.empty_like(leaf.value, device="cpu") for leaf in described]
    put = {id(leaf): Leaf(leaf.path, place) for leaf, place in zip(described, places, strict=True)}
    leaves = {key: put.get(id(leaf), leaf) for key, leaf in exported.leaves.items()}
    save_pickled(build(leaves), path, places, lambda number: exported.read(described[number].value))


def import_checkpoint(
    source: str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str],
    *,
    form: Format | None = None,
    part: str = "",
    step: int = 0,
    allow_pickle: bool = False,
    skip_objects: bool = False,
    timeout: timedelta = CONVERSION_TIMEOUT,
    token: str | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Save a checkpoint of another program as one of keepstep. Runs no code from the files.

    Args:
        source: a file of torch.save, a safetensors file, index or folder, a directory of DCP, or a folder of
            torch_checkpointing. docs/interchange.md says what is read.
        checkpoint_id: see ``keepstep.checkpoint.save``. It must be new.
        form: format of the source. Default: found from its files.
        part: key below which the values are stored, such as ``model``.
        step: step of the training, for lists of checkpoints.
        allow_pickle: run the code that a file of torch.save names. Only for a file of one's own.
        skip_objects: leave out values that cannot be read without running code, or that keepstep cannot store.
        timeout: time limit of the save.
        token: token for the relay. Default: that of the environment.
        progress: see ``Progress``.

    Raises:
        RefusedClass: a file has objects of other classes than tensors and plain values.
        ForeignCheckpointError: a file is missing or damaged.
        UnsupportedValue: keepstep cannot store a value; the error names its path.
        CheckpointError: the checkpoint exists, or was not saved.
    """
    path = Path(source)
    progress = progress or _ignore
    form = form or Format(format_of(path))
    skipped: list[str] | None = [] if skip_objects else None
    safetensors = find_safetensors(path) if form is Format.SAFETENSORS else None
    files = path.rglob("*") if path.is_dir() else [path]
    files = files if safetensors is None else safetensors.paths
    report = _Report("reading", sum(one.stat().st_size for one in files if one.is_file()), progress)
    unread: Unread = {}
    state: Any
    match form:
        case Format.SAFETENSORS:
            assert safetensors is not None
            state, unread = read_safetensors_files(safetensors, report.add)
        case Format.TORCH:
            read = read_items if path.is_dir() else load_file
            state = read(path, allow_pickle=allow_pickle)
        case Format.DCP:
            directory = DcpDirectory(path, skip_objects=skipped, report=report.add)
            state, unread = with_companions(directory.state, path, skipped), directory.unread
    if not isinstance(state, Mapping):
        raise ForeignCheckpointError(f"{path} has a {type(state).__name__}, expected a dict: save a state_dict()")
    for step_of_path in reversed(part.split(".") if part else []):
        state = {step_of_path: state}
    try:
        leaves = flatten(state)
    except RecursionError as error:
        raise ForeignCheckpointError(f"{path} has a state that is nested too deep, or contains itself") from error
    if skipped is not None:
        for key in [key for key, leaf in leaves.items() if not _can_store(leaf)]:
            skipped.append(key)
            del leaves[key]
    describe({key: leaf.value for key, leaf in leaves.items()})  # raises before anything is written
    done = _converted(form, leaves, skipped or [])
    if not unread:
        progress("writing", 0, 0)
    save_unread(build(leaves), checkpoint_id, unread, step=step, timeout=timeout, token=token)
    return done


def _ignore(what: str, done: int, total: int) -> None:
    """Show no progress."""


class _Report:
    """Adds up bytes."""

    def __init__(self, what: str, total: int, progress: Progress) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = 0
        self.add(0)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._what, self._done, self._total)


def _format_to_write(path: Path, shard_bytes: int | None) -> Format:
    if path.suffix in (".pt", ".pth", ".bin"):
        return Format.TORCH
    return Format.SAFETENSORS if path.suffix == SUFFIX or shard_bytes is not None else Format.DCP


class _Export:
    """The values to export.

    Attributes:
        leaves: by key, without the part. Tensors are those of the meta device: ``read`` returns their values.
        left_out: keys of the values that the format cannot hold.
    """

    def __init__(
        self, stored: StoredCheckpoint, part: str, form: Format, skip_objects: bool, progress: Progress
    ) -> None:
        chosen = {
            key: path
            for key in (*stored.tensors, *stored.objects)
            if (path := _below(stored.paths[key], part)) is not None
        }
        if not chosen:
            raise CheckpointError(
                f"nothing to export: the checkpoint has no value below {part!r}; it has "
                f"{listed(stored.keys(), MAX_NAMED)}"
                if part
                else "nothing to export: the checkpoint is empty"
            )
        if () in chosen.values():
            raise CheckpointError("cannot export the checkpoint: a value of it has no key")
        self.left_out = [key for key in chosen if key in stored.objects] if form is Format.SAFETENSORS else []
        if self.left_out and not skip_objects:
            raise CannotHold(
                f"safetensors holds only tensors, and {listed(self.left_out, MAX_NAMED)} "
                f"{'is' if len(self.left_out) == 1 else 'are'} not: leave such values out with --skip-objects "
                f"(skip_objects=True), or export only a part, such as --part model"
            )
        self._stored = stored
        self._form = form
        self._report = _Report("converting", sum(_nbytes(stored, key) for key in chosen), progress)
        self._keys: dict[int, str] = {}
        """Key in the checkpoint, by the id of the tensor in ``leaves``."""
        self.leaves: dict[str, Leaf] = {}
        for key, path in chosen.items():
            if key not in self.left_out:
                try:
                    self.leaves[key_of(path)] = Leaf(path, self._value(key))
                except CannotHold:
                    if not skip_objects:
                        raise
                    self.left_out.append(key)

    def _value(self, key: str) -> Any:
        tensor = self._stored.tensors.get(key)
        if tensor is None:
            value = self._stored.value(key)
            if self._form is Format.DCP and isinstance(value, torch.Tensor):
                raise CannotHold(
                    f"DCP does not hold {key}, a {class_name(type(value))} of {value.dtype}: leave it out with "
                    f"--skip-objects (skip_objects=True), or export a file of torch.save"
                )
            write_pickled(value, io.BytesIO(), key)
            return value
        without = WITHOUT_COPY | (BITS if self._form is Format.DCP else frozenset())
        if tensor.dtype in without and self._form is not Format.SAFETENSORS:
            raise CannotHold(f"{key} has dtype {tensor.dtype}, which {self._form} does not hold: store it as uint8")
        described = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._keys[id(described)] = key
        return described

    def is_described(self, value: Any) -> bool:
        """Return whether ``read`` returns the values of ``value``."""
        return id(value) in self._keys

    def read(self, described: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor of ``leaves``, in new memory."""
        key = self._keys[id(described)]
        tensor = self._stored.tensor(key)
        self._report.add(tensor.nbytes)
        return tensor


def _nbytes(stored: StoredCheckpoint, key: str) -> int:
    tensor = stored.tensors.get(key)
    return 0 if tensor is None else torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _below(path: tuple[Any, ...], part: str) -> tuple[Any, ...] | None:
    """Return the rest of ``path`` below the key ``part``; None: it is not below it."""
    if not part:
        return path
    return next((path[n:] for n in range(1, len(path)) if key_of(path[:n]) == part), None)


def _can_store(leaf: Leaf) -> bool:
    try:
        describe(leaf.value)
    except UnsupportedValue:
        return False
    return True


def _converted(form: Format, leaves: Mapping[str, Leaf], left_out: list[str]) -> Converted:
    tensors = [leaf.value for leaf in leaves.values() if isinstance(leaf.value, torch.Tensor)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Converted(form, len(tensors), len(leaves) - len(tensors), nbytes, tuple(left_out))
