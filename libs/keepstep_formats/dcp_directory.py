"""Directories of torch.distributed.checkpoint, read without running code from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch

from keepstep.state.flattening import Leaf, build
from keepstep_formats.dcp_metadata import ByteRange, DcpContent, chunk_shape, read_dcp_metadata
from keepstep_formats.foreign_errors import ForeignCheckpointError, RefusedClass
from keepstep_formats.pickled_items import load_pickled
from keepstep_formats.plain_tensor import read_plain_tensor
from keepstep_formats.safetensors_files import LENGTH_BYTES, Header, Report, is_safetensors, read_header, read_tensor
from keepstep_mesh.protocol.boxes import Box, Sizes, whole


class DcpDirectory:
    """A directory of DCP whose tensors are read one at a time.

    Args:
        path: written by ``dcp.save`` (torch 2.0 to 2.15) with torch.save or safetensors, or by Megatron Core.
        content: what it holds. Default: what its ``.metadata`` says.
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

    def __init__(
        self,
        path: Path,
        content: DcpContent | None = None,
        *,
        skip_objects: list[str] | None = None,
        report: Report = lambda _: None,
    ) -> None:
        self._path = path
        self._content = content or read_dcp_metadata(path)
        self._report = report
        self._headers: dict[tuple[str, int], Header] = {}
        """Of the safetensors that were read, by their file and position."""
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
            header = self._headers.get((at.file, at.offset)) or _header_at(file, path, at)
            if header is not None:
                self._headers[at.file, at.offset] = header
            elif into.is_contiguous() and read_plain_tensor(file, at.offset, at.length, into):
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
        shard = _shard(file, _header_at(file, directory / where.file, where), key, box, where, what)
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
        what = f"{key!r} in {path}"
        return load_pickled(_bytes(file, where, what), what, allow_pickle=allow_pickle)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ForeignCheckpointError(f"{path} not found: the directory is incomplete") from None


def _header_at(file: IO[bytes], path: Path, at: ByteRange) -> Header | None:
    """Return the header of the safetensors that begin at a position of a file. None: torch.save wrote a value there."""
    file.seek(at.offset)
    return read_header(path, at.offset) if is_safetensors(file.read(LENGTH_BYTES + 1)) else None


def _shard(file: IO[bytes], header: Header | None, key: str, box: Box, at: ByteRange, what: str) -> Any:
    if header is None:
        return load_pickled(_bytes(file, at, what), what)
    if key not in header.tensors:
        raise ForeignCheckpointError(f"{what}: the file does not have it")
    if header.offsets is not None and header.offsets[key] != box.offset:
        raise ForeignCheckpointError(f"{what} is the shard at {header.offsets[key]}, but .metadata says {box.offset}")
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
