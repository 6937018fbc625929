"""Directories of torch.distributed.checkpoint: read without running code from them, written for ``dcp.load``."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from keepstep.state.flattening import Leaf, build
from keepstep_formats.dcp_metadata import ByteRange, chunk_shape, read_dcp_metadata
from keepstep_formats.finished_output import finished_output
from keepstep_formats.foreign_errors import CannotHold, ForeignCheckpointError, RefusedClass
from keepstep_formats.pickled_items import load_pickled, write_pickled
from keepstep_formats.plain_tensor import read_plain_tensor
from keepstep_formats.safetensors_files import Header, Read, Report, read_header, read_tensor
from keepstep_mesh.protocol.boxes import Box, Sizes, whole

_SAVED_BY_TORCH = (b"PK", b"\x80\x02")
"""First bytes of a file of torch.save. Other files are safetensors."""
_SHARDING_INFO = "DCP_SHARDING_INFO"
FILE = "__0_0.distcp"
"""Of rank 0, as torch names it."""


class DcpDirectory:
    """A directory of DCP whose tensors are read one at a time.

    Args:
        path: written by ``dcp.save`` (torch 2.0 to 2.13) with torch.save or safetensors, or by Megatron Core.
        skip_objects: receives the keys of values that cannot be read without running code. None: they are an error.
        report: receives the bytes of files, when a tensor is read for the first time.

    Attributes:
        state: as it was saved, with whole tensors of the CPU that have no values yet: ``unread`` returns them. Their
            memory is reserved, but none of it is used.
        unread: functions that read the tensors of ``state``, by their address.

    Raises:
        RefusedClass: ``.metadata`` or a value has objects of other classes.
        ForeignCheckpointError: a file is missing or damaged, or does not fit ``.metadata``. ``unread`` raises it too.
    """

    def __init__(self, path: Path, *, skip_objects: list[str] | None = None, report: Report = lambda _: None) -> None:
        self._path = path
        self._content = read_dcp_metadata(path)
        self._report = report
        self._headers: dict[str, Header | None] = {}
        """Of each file that was opened. None: torch.save wrote it."""
        self._reported: set[str] = set()
        for name in {at.file for one in self._content.tensors.values() for at in one.shards.values()}:
            _opened(path / name).close()  # before anything is written
        leaves = {key: self._leaf(key, self._place(key)) for key in self._content.tensors}
        self.unread: dict[int, Callable[[], torch.Tensor]] = {
            leaf.value.data_ptr(): partial(self._read, key) for key, leaf in leaves.items() if leaf.value.numel()
        }
        for key, at in self._content.objects.items():
            try:
                leaves[key] = self._leaf(key, read_value(path, at, key))
            except RefusedClass as error:
                if skip_objects is None:
                    raise RefusedClass(f"{error}. --skip-objects leaves such values out.") from error
                skip_objects.append(key)
        try:
            self.state = build(leaves)
        except (AttributeError, TypeError) as error:
            raise ForeignCheckpointError(f"{path}: the paths in planner_data contradict each other") from error

    def _leaf(self, key: str, value: Any) -> Leaf:
        return Leaf(self._content.paths[key], value)

    def _place(self, key: str) -> torch.Tensor:
        tensor = self._content.tensors[key]
        return torch.empty(self._content.flattened.get(key, tensor.shape), dtype=tensor.dtype)

    def _read(self, key: str) -> torch.Tensor:
        stored = self._content.tensors[key]
        values = torch.empty(stored.shape, dtype=stored.dtype)
        for box, at in sorted(stored.shards.items(), key=lambda one: (one[1].file, one[1].offset)):
            try:
                self._read_shard(key, box, at, values[box.within(whole(stored.shape))])
            except OSError as error:
                path = self._path / at.file
                raise ForeignCheckpointError(f"{key!r} in {path} cannot be read: {error.strerror or error}") from error
        if key not in self._reported:
            self._reported.add(key)
            self._report(sum(at.length for at in stored.shards.values()))
        original = self._content.flattened.get(key)
        return values if original is None else _unflattened(values, original, key)

    def _read_shard(self, key: str, box: Box, at: ByteRange, into: torch.Tensor) -> None:
        path = self._path / at.file
        with _opened(path) as file:
            if at.file not in self._headers:
                self._headers[at.file] = _header_of(file, path)
            header = self._headers[at.file]
            if header is None and into.is_contiguous() and read_plain_tensor(file, at.offset, at.length, into):
                return
            what = f"{key!r} in {path}"
            shard = _check_shard(_shard(file, header, key, box, at, what), into.dtype, box, what)
        with torch.no_grad():
            into.copy_(shard)


def read_shard(directory: Path, where: ByteRange, key: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return one stored part of a tensor.

    Args:
        directory: the checkpoint.
        where: its bytes.
        key: of the tensor.
        box: of the part, as ``.metadata`` has it.
        dtype: of the tensor.

    Raises:
        ForeignCheckpointError: the file is missing or damaged, or does not fit ``.metadata``.
    """
    what = f"{key!r} in {directory / where.file}"
    with _opened(directory / where.file) as file:
        shard = _shard(file, _header_of(file, directory / where.file), key, box, where, what)
    return _check_shard(shard, dtype, box, what)


def read_shard_into(directory: Path, where: ByteRange, key: str, box: Box, memory: torch.Tensor) -> None:
    """Read one stored part of a tensor into memory. After an error, some of its elements may be set.

    Args:
        directory: see ``read_shard``.
        where: see ``read_shard``.
        key: see ``read_shard``.
        box: see ``read_shard``.
        memory: contiguous, on the CPU, of the dtype of the tensor and the shape of ``box``.

    Raises:
        ForeignCheckpointError: the file is missing or damaged, or does not fit ``.metadata``.
    """
    with _opened(directory / where.file) as file:
        if read_plain_tensor(file, where.offset, where.length, memory):
            return
    memory.copy_(read_shard(directory, where, key, box, memory.dtype))


def read_value(directory: Path, where: ByteRange, key: str, *, allow_pickle: bool = False) -> Any:
    """Return one value that is not a tensor.

    Args:
        directory: the checkpoint.
        where: its bytes.
        key: of the value.
        allow_pickle: run the code that the value names. Only for a checkpoint of one's own.

    Raises:
        RefusedClass: the value has objects of other classes than tensors and plain values.
        ForeignCheckpointError: the file is missing or damaged.
    """
    path = directory / where.file
    with _opened(path) as file:
        return _value(file, _header_of(file, path), where, f"{key!r} in {path}", allow_pickle=allow_pickle)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ForeignCheckpointError(f"{path} not found: the directory is incomplete") from None


def _header_of(file: IO[bytes], path: Path) -> Header | None:
    """Return the header of a safetensors file. None: torch.save wrote the file."""
    return None if file.read(2).startswith(_SAVED_BY_TORCH) else read_header(path)


def _value(file: IO[bytes], header: Header | None, at: ByteRange, what: str, *, allow_pickle: bool = False) -> Any:
    if header is not None:
        raise ForeignCheckpointError(f"{what} is not a tensor, and the file is safetensors, which holds only these")
    return load_pickled(_bytes(file, at, what), what, allow_pickle=allow_pickle)


def _shard(file: IO[bytes], header: Header | None, key: str, box: Box, at: ByteRange, what: str) -> Any:
    if header is None:
        return load_pickled(_bytes(file, at, what), what)
    if key not in header.tensors:
        raise ForeignCheckpointError(f"{what}: the file does not have it")
    try:
        offsets = json.loads(header.metadata.get(_SHARDING_INFO, "{}")).get(key, {}).get("saved_offsets")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ForeignCheckpointError(f"{what}: invalid {_SHARDING_INFO}") from error
    if offsets is not None and offsets != list(box.offset):
        raise ForeignCheckpointError(f"{what} is the shard at {offsets}, but .metadata says {list(box.offset)}")
    return read_tensor(file, header.tensors[key])


def _check_shard(shard: Any, dtype: torch.dtype, box: Box, what: str) -> torch.Tensor:
    if type(shard) not in (torch.Tensor, torch.nn.Parameter):
        raise ForeignCheckpointError(f"{what} is a {type(shard).__name__}, expected a tensor")
    if shard.dtype != dtype or tuple(shard.shape) != box.shape:
        raise ForeignCheckpointError(
            f"{what} is a {shard.dtype} tensor of shape {tuple(shard.shape)}; .metadata says {dtype} and {box.shape}"
        )
    return cast("torch.Tensor", shard)


def _unflattened(tensor: torch.Tensor, original: Sizes, key: str) -> torch.Tensor:
    """Return a tensor that is stored as flattened chunks in its original shape."""
    counts, chunk = tensor.shape[:-1], chunk_shape(original, tuple(tensor.shape), key)
    axes = [axis for number in range(len(counts)) for axis in (number, len(counts) + number)]
    return tensor.view(*counts, *chunk).permute(axes).reshape(original)


def _bytes(file: IO[bytes], at: ByteRange, what: str) -> bytes:
    file.seek(0, 2)
    if at.offset + at.length > (size := file.tell()):
        raise ForeignCheckpointError(f"{what} ends at byte {at.offset + at.length} of a file of {size} bytes")
    file.seek(at.offset)
    return file.read(at.length)


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
        write_pickled(value.detach() if is_whole else value.detach().clone(), file)
    else:
        file.write(value.getbuffer())
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
