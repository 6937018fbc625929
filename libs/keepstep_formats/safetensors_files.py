"""Files in the safetensors format: a JSON header, then the bytes of the tensors. One file, or several with an index."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from keepstep_formats.dcp_metadata import MAX_DIMENSIONS, MAX_SIZE
from keepstep_formats.finished_output import finished_output
from keepstep_formats.foreign_errors import CannotHold, ForeignCheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
LENGTH_BYTES = 8
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
PACKED = "F4"
"""Two elements share a byte. Files count elements in the last dimension of a shape, and torch counts bytes."""
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    PACKED: torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHARDING_INFO = "DCP_SHARDING_INFO"
"""Key in the metadata of files that DCP writes: JSON with the position of each shard in its tensor."""

Report = Callable[[int], None]
"""Receives the bytes that were read or written since the last call."""
Read = Callable[[torch.Tensor], torch.Tensor]
"""Returns the values of a tensor of the state, which may be one of the meta device. It is called when the tensor is
written, so that one tensor at a time needs memory."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its type, and the position of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The header of one file."""

    tensors: dict[str, StoredTensor]
    offsets: dict[str, tuple[int, ...]] | None
    """Position of each tensor in the whole of which it is a shard. None: DCP did not write the file."""


def is_safetensors(start: bytes) -> bool:
    """Return whether bytes begin a safetensors file: the length of its header, then a JSON object."""
    return start[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"


def read_header(path: Path, start: int = 0) -> Header:
    """Read and check the header of an untrusted file. Raises ``ForeignCheckpointError``.

    Args:
        path: the file.
        start: position of its first byte: DCP writes other values before it.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start)
            return _header(file, start, size)
    except FileNotFoundError:
        raise ForeignCheckpointError(f"{path} not found") from None
    except (ForeignCheckpointError, ValueError, RecursionError) as error:
        raise ForeignCheckpointError(f"{path} is no valid safetensors file: {error}") from error


def _header(file: IO[bytes], start: int, size: int) -> Header:
    begin = start + LENGTH_BYTES
    if size < begin:
        raise ForeignCheckpointError(f"file too short: {size} bytes, expected at least {begin}")
    length, limit = int.from_bytes(file.read(LENGTH_BYTES), "little"), min(size - begin, MAX_HEADER_BYTES)
    if length > limit:
        raise ForeignCheckpointError(f"header too large: {length} bytes (limit {limit}); the file is damaged")
    top = json.loads(file.read(length))
    if type(top) is not dict:
        raise ForeignCheckpointError("its header is not a JSON object")
    metadata = top.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise ForeignCheckpointError("its __metadata__ is not a map of strings")
    end = begin + length
    tensors = {key: _row(key, row, end) for key, row in top.items()}
    for key, one in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if one.start != end:
            raise ForeignCheckpointError(f"{key} begins at byte {one.start}, expected {end}")
        end += one.nbytes
    if end != size:
        raise ForeignCheckpointError(f"the file has {size} bytes, its header describes {end}: it is damaged")
    return Header(tensors, _offsets(metadata[_SHARDING_INFO], tensors) if _SHARDING_INFO in metadata else None)


def _offsets(text: str, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    known = json.loads(text)
    for key, stored in tensors.items():
        row = known.get(key) if type(known) is dict else None
        offset: Any = row.get("saved_offsets") if type(row) is dict else None
        if not _are_sizes(offset) or len(offset) != len(stored.shape):
            raise ForeignCheckpointError(f"{key} of shape {stored.shape} has position {offset} in {_SHARDING_INFO}")
        found[key] = tuple(offset)
    return found


def _are_sizes(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= MAX_DIMENSIONS
        and all(type(one) is int and 0 <= one <= MAX_SIZE for one in value)
    )


def _row(key: str, row: Any, begin: int) -> StoredTensor:
    fields: dict[str, Any] = row if type(row) is dict else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape", []), fields.get("data_offsets", [])
    if dtype not in DTYPES:
        raise ForeignCheckpointError(
            f"{key} has dtype {str(dtype)[:40]}, which torch does not have; supported: {', '.join(DTYPES)}"
        )
    for numbers in (shape, offsets):
        if not _are_sizes(numbers):
            raise ForeignCheckpointError(f"{key} has an invalid shape or position")
    if dtype == PACKED:
        if not shape or shape[-1] % 2:
            raise ForeignCheckpointError(f"{key} of dtype {PACKED} has shape {shape}: torch needs an even last size")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ForeignCheckpointError(f"{key} of shape {shape} and dtype {dtype} has data_offsets {offsets}")
    return StoredTensor(DTYPES[dtype], tuple(shape), begin + offsets[0], nbytes)


def read_tensor(file: IO[bytes], stored: StoredTensor) -> torch.Tensor:
    """Return a tensor of a file that ``read_header`` has checked."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    if stored.nbytes:
        file.seek(stored.start)
        target = tensor.reshape(-1).view(torch.uint8).numpy()
        if file.readinto(target.data) != stored.nbytes:  # type: ignore[attr-defined]
            raise ForeignCheckpointError("the file became shorter while it was read")
    return tensor


def read_safetensors(headers: Mapping[Path, Header], report: Report = lambda _: None) -> dict[str, torch.Tensor]:
    """Return the tensors of files. No two of them may have the same.

    Their memory is that of the files, mapped: a page is read when it is used, and needs no memory of the process.
    """
    found: dict[str, torch.Tensor] = {}
    for path, header in headers.items():
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # closed when its last tensor is gone
        for key, stored in header.tensors.items():
            found[key] = _mapped(memory, stored)
            report(stored.nbytes)
    return found


def _mapped(memory: mmap.mmap, stored: StoredTensor) -> torch.Tensor:
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    flat = torch.frombuffer(memory, dtype=stored.dtype, count=math.prod(stored.shape), offset=stored.start)
    return flat.reshape(stored.shape)


def write_safetensors(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    shard_bytes: int | None = None,
    report: Report = lambda _: None,
    read: Read = lambda tensor: tensor,
) -> None:
    """Write tensors to a file, or to files of at most ``shard_bytes`` and an index in the new folder ``path``.

    Args:
        tensors: by key.
        path: the new file or folder.
        shard_bytes: None: one file.
        report: receives the bytes that were written.
        read: see ``Read``.

    Raises:
        CannotHold: a tensor has a dtype that the format does not have.
        ForeignCheckpointError: ``path`` exists.
    """
    for key, tensor in tensors.items():
        if tensor.dtype not in _NAMES or (_NAMES[tensor.dtype] == PACKED and not tensor.ndim):
            shape = tuple(tensor.shape)
            raise CannotHold(f"{key} has dtype {tensor.dtype} and shape {shape}, which safetensors does not have")
    with finished_output(path) as temporary:
        if shard_bytes is None:
            _write_file(tensors, temporary, report, read)
            return
        temporary.mkdir()
        shards = _split(tensors, shard_bytes)
        names = [f"model-{number + 1:05}-of-{len(shards):05}{SUFFIX}" for number in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            _write_file(shard, temporary / name, report, read)
        total = sum(tensor.nbytes for tensor in tensors.values())
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return shards


def _write_file(tensors: Mapping[str, torch.Tensor], path: Path, report: Report, read: Read) -> None:
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # keeps every tensor aligned
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered:
        name, shape = _NAMES[tensor.dtype], list(tensor.shape)
        if name == PACKED:
            shape[-1] *= 2
        rows[key] = {"dtype": name, "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CannotHold(f"header too large: {len(text)} bytes (limit {MAX_HEADER_BYTES})")
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(read(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            report(tensor.nbytes)
