"""Directories that plain ``dcp.load`` and Megatron Core read, written by torch's own classes.

Load this module when something is written: torch.distributed.checkpoint takes as long to import as torch.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from keepstep_formats.dcp_metadata import ORIGINAL_SHAPE, ByteRange, DcpContent, read_dcp_metadata
from keepstep_formats.finished_output import finished_output
from keepstep_formats.foreign_errors import CannotHold, ForeignCheckpointError
from keepstep_formats.pickled_items import pickled_metadata, write_pickled
from keepstep_formats.safetensors_files import Read
from keepstep_mesh.protocol.boxes import uncovered

FILE = "__0_0.distcp"
"""Of rank 0, as torch names it."""


def dcp_metadata_file(directory: Path | None, content: DcpContent) -> bytes:
    """Return the bytes of ``.metadata``. Inverse of ``read_dcp_metadata``.

    Args:
        directory: the checkpoint. None: the file does not name it, and is used for several.
        content: its tensors and objects. ``paths`` are not written.

    Raises:
        ForeignCheckpointError: a tensor is incomplete, but not in ``content.incomplete``.
    """
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in content.tensors.items():
        if key not in content.incomplete and (problem := uncovered(tensor.shape, list(tensor.shards))):
            raise ForeignCheckpointError(f"tensor {key!r} is incomplete: {problem}")
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in tensor.shards]
        items[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
        for number, (box, where) in enumerate(tensor.shards.items()):
            stored[MetadataIndex(key, torch.Size(box.offset), number)] = _info(where)
    for key, where in content.objects.items():
        items[key] = BytesStorageMetadata()
        stored[MetadataIndex(key)] = _info(where)
    place = None if directory is None else str(directory)
    metadata = Metadata(items, {}, stored, StorageMeta(checkpoint_id=place))
    if content.flattened:
        shapes = {key: {ORIGINAL_SHAPE: shape} for key, shape in content.flattened.items()}
        metadata.mcore_data = shapes  # type: ignore[attr-defined]  # where Megatron Core until 0.15 looks for it
    return pickled_metadata(metadata)


def _info(where: ByteRange) -> _StorageInfo:
    return _StorageInfo(where.file, where.offset, where.length)


class _Writer(FileSystemWriter):
    """Writes one file, item by item, and names the final directory in ``.metadata``.

    torch's own method keeps all tensors of a file in memory, and loses errors of its threads.
    """

    def __init__(self, path: Path, final: Path) -> None:
        super().__init__(path)
        self._folder = path
        self._final = final

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with (self._folder / FILE).open("wb") as file:
            results = [_write_item(file, item, planner.resolve_data(item)) for item in plan.items]
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _write_item(file: IO[bytes], item: WriteItem, value: torch.Tensor | io.BytesIO) -> WriteResult:
    start = file.tell()
    if isinstance(value, torch.Tensor):
        is_whole = value.untyped_storage().size() == value.nbytes
        write_pickled(value.detach() if is_whole else value.detach().clone(), file, item.index.fqn)
    else:
        file.write(value.getvalue())
    length = file.tell() - start
    return WriteResult(item.index, length, _StorageInfo(FILE, start, length))


class _Planner(DefaultSavePlanner):
    """Takes the values of tensors from ``read``."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        if not isinstance(value, torch.Tensor):
            return value
        gc.collect(1)  # torch.save leaves the last tensor in a cycle
        return self._read(value)

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().transform_object(write_item, value)
        data = io.BytesIO()
        write_pickled(value, data, write_item.index.fqn)
        return data


def write_dcp_directory(state: Mapping[str, Any], path: Path, read: Read = lambda tensor: tensor) -> list[str]:
    """Write a state, so that plain ``dcp.load(checkpoint_id=path)`` reads it.

    Args:
        state: nested dicts and lists, with tensors on the CPU. Other values are pickled, as DCP does.
        path: the new directory.
        read: see ``Read``.

    Returns:
        Paths of empty dicts. DCP has no place for them, and ``dcp.load`` does not expect them.

    Raises:
        CannotHold: two values would get the same key.
        ForeignCheckpointError: ``path`` exists.
    """
    empty: list[str] = []
    _find_empty(state, (), empty)
    with finished_output(path) as temporary:
        writer, planner = _Writer(temporary, path.absolute()), _Planner(read)
        try:
            planner.set_up_planner(dict(state), is_coordinator=True)
        except ValueError as error:
            raise CannotHold(f"DCP cannot hold this state: {error}; rename one of the two") from error
        writer.set_up_storage_writer(is_coordinator=True)
        local = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([local])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        results = writer.write_data(plan, planner).wait()
        writer.finish(metadata, [results])
        written = read_dcp_metadata(temporary)
        if len(written.tensors) + len(written.objects) != len(plan.items):
            raise ForeignCheckpointError(f"torch did not write all of the {len(plan.items)} values to {path}")
    return empty


def _find_empty(value: Any, path: tuple[Any, ...], found: list[str]) -> None:
    if isinstance(value, Mapping):
        if not value and path:
            found.append(".".join(map(str, path)))
        for key, item in value.items():
            _find_empty(item, (*path, key), found)
