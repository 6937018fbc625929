"""The ``zarr`` format, which Megatron Core wrote until version 0.15: read only, without the zarr package.

Each tensor is a directory of the zarr format, version 2: ``.zarray`` describes it, and one file holds the bytes of each
of its equal parts, which zarr calls chunks. Megatron Core compressed none of them, and wrote the name ``bfloat16``,
which the zarr package does not know. Objects are ``KEY/shard_OFFSET_SHAPE.pt``. Nothing has check sums, except the
files of torch.save.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from keepstep_formats.foreign_errors import ForeignCheckpointError
from keepstep_formats.pickled_items import load_pickled
from keepstep_megatron.strategies.common_file import object_files
from keepstep_megatron.strategies.directory_loading import DirectoryLoadStrategy, read_all
from keepstep_megatron.strategies.stored_state import Destination, StoredState, StoredTensorFacts
from keepstep_mesh.protocol.boxes import Box, Sizes
from keepstep_mesh.text import listed

ARRAY = ".zarray"
MAX_ARRAY_BYTES = 1 << 20
MAX_DIMENSIONS = 64
DTYPES = {
    "|b1": torch.bool,
    "|u1": torch.uint8,
    "|i1": torch.int8,
    "<i2": torch.int16,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<c8": torch.complex64,
    "<c16": torch.complex128,
    "bfloat16": torch.bfloat16,
    "<V2": torch.bfloat16,
    "|V2": torch.bfloat16,
}
PLAIN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C"}
"""What Megatron Core wrote for every tensor."""


@dataclass(frozen=True)
class _Array:
    """A stored tensor."""

    path: Path
    key: str
    dtype: torch.dtype
    shape: Sizes
    part: Sizes
    """Shape of each stored part, also of those that reach over the end of the tensor."""
    separator: str

    def parts_of(self, box: Box) -> Iterator[Sizes]:
        """Yield the numbers of the parts that have elements of ``box``, along each axis."""
        sizes = zip(box.offset, box.shape, self.part, strict=True)
        yield from product(*(range(at // part, -(-(at + size) // part)) for at, size, part in sizes))

    def box_of(self, number: Sizes) -> Box:
        return Box(tuple(at * part for at, part in zip(number, self.part, strict=True)), self.part)

    def read(self, number: Sizes) -> torch.Tensor:
        """Return a stored part."""
        path = self.path / (self.separator.join(map(str, number)) or "0")
        expected = math.prod(self.part) * self.dtype.itemsize
        try:
            data = bytearray(path.read_bytes())
        except FileNotFoundError:
            raise ForeignCheckpointError(f"{path}, a part of {self.key!r}, not found: restore the file") from None
        if len(data) != expected:
            raise ForeignCheckpointError(
                f"{path}, a part of {self.key!r}, has {len(data)} bytes, expected {expected}: the file is damaged"
            )
        return torch.frombuffer(data, dtype=self.dtype).view(self.part)


class ZarrState:
    """See ``StoredState``.

    Args:
        directory: the checkpoint.
        allow_pickle: run the code that objects name. Only for a checkpoint of one's own.

    Raises:
        ForeignCheckpointError: a tensor is described in a way that Megatron Core did not use.
    """

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        self._directory = directory
        self._allow_pickle = allow_pickle
        self._arrays: dict[str, _Array] = {}
        for folder, folders, files in os.walk(directory):
            key = Path(folder).relative_to(directory).as_posix()
            if ARRAY in files:
                folders.clear()  # with separator "/", parts are in folders
                self._arrays[key] = _read_array(Path(folder), key)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensorFacts]:
        """See ``StoredState``."""
        return {key: StoredTensorFacts(one.dtype, one.shape) for key, one in self._arrays.items()}

    @property
    def objects(self) -> tuple[str, ...]:
        """See ``StoredState``."""
        return tuple(self._objects)

    @cached_property
    def _objects(self) -> dict[str, Path]:
        return object_files(self._directory)

    def read(self, destinations: list[Destination]) -> None:
        """See ``StoredState``. Reads each stored part once."""
        wanted: defaultdict[tuple[str, Sizes], list[Destination]] = defaultdict(list)
        for one in destinations:
            for number in self._arrays[one.key].parts_of(one.box):
                wanted[one.key, number].append(one)
        read_all(partial(self._copy, self._arrays[key], number, to) for (key, number), to in wanted.items())

    @staticmethod
    def _copy(array: _Array, number: Sizes, destinations: list[Destination]) -> None:
        stored, box = array.read(number), array.box_of(number)
        with torch.no_grad():
            for one in destinations:
                overlap = one.box.overlap(box)
                if overlap is not None:
                    one.memory[overlap.within(one.box)].copy_(stored[overlap.within(box)])

    def value(self, unique_key: str) -> Any:
        """See ``StoredState``."""
        path = self._objects[unique_key]
        return load_pickled(path, str(path), allow_pickle=self._allow_pickle)


def _read_array(path: Path, key: str) -> _Array:
    with (path / ARRAY).open("rb") as file:
        content = file.read(MAX_ARRAY_BYTES + 1)
    try:
        found = json.loads(content)
        fields = {name: found[name] for name in PLAIN}
        dtype, shape, part = found["dtype"], _sizes(found["shape"]), _sizes(found["chunks"])
        separator = found.get("dimension_separator", ".")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{path / ARRAY} does not describe an array: {type(error).__name__}: {error}"
        raise ForeignCheckpointError(text) from error
    for name, value in fields.items():
        if value != PLAIN[name]:
            raise ForeignCheckpointError(
                f"{key!r} is stored with {name} {value!r}, but Megatron Core wrote {PLAIN[name]!r}: copy the array "
                f"without it, with the zarr package"
            )
    if len(shape) != len(part) or 0 in part or separator not in (".", "/"):
        raise ForeignCheckpointError(f"{path / ARRAY} has shape {shape}, chunks {part} and separator {separator!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ForeignCheckpointError(f"{key!r} is stored as {dtype!r}: expected {listed(DTYPES, len(DTYPES))}")
    return _Array(path, key, DTYPES[dtype], shape, part, separator)


def _sizes(value: Any) -> Sizes:
    if type(value) is not list or len(value) > MAX_DIMENSIONS or any(type(one) is not int or one < 0 for one in value):
        raise ValueError(f"{str(value)[:100]}: expected a list of sizes")
    return tuple(value)


class ZarrLoadShardedStrategy(DirectoryLoadStrategy):
    """Loads a directory that Megatron Core wrote as ``("zarr", 1)``, up to version 0.15.

    Args:
        allow_pickle: run the code that objects name. Only for a checkpoint of one's own.
    """

    def state_of(self, directory: Path, *, allow_pickle: bool) -> StoredState:
        """See ``DirectoryLoadStrategy``."""
        return ZarrState(directory, allow_pickle=allow_pickle)
