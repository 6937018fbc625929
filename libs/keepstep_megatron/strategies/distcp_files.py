"""Writing of ``.distcp`` files: what a rank writes, and where its items are."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

import msgpack
import torch

from keepstep.state.values.leaves import TORCH_DTYPE_NAMES, TORCH_DTYPES, copy_elements
from keepstep_formats.dcp_metadata import METADATA, ByteRange, DcpContent, ForeignTensor
from keepstep_formats.pickled_items import write_pickled
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import nested_values
from keepstep_megatron.mapping import ShardedObject, ShardedStateDict, ShardedTensor, is_main_replica
from keepstep_megatron.pieces import local_data, pieces_of
from keepstep_megatron.strategies.common_file import COMMON_STATE_FNAME, pickled
from keepstep_mesh.protocol.boxes import Box, Sizes
from keepstep_mesh.threads.starting import ThreadPoolExecutor

T = TypeVar("T")
_FILE = re.compile(r".*__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Item:
    """A part of a tensor, or an object, that this rank writes."""

    key: str
    value: Any
    """A tensor; or the bytes of an object."""
    box: Box | None = None
    """Of the stored tensor. None: an object."""
    shape: Sizes = ()
    """Of the stored tensor."""
    original: Sizes | None = None
    """Of the global tensor, if flattened chunks of it are stored."""

    @property
    def nbytes(self) -> int:
        return int(self.value.nbytes) if self.box is not None else len(self.value)

    def copied(self) -> Item:
        """Return a copy in memory of the CPU, which training does not change."""
        if self.box is None:
            return self
        return replace(self, value=copy_elements(torch.empty_like(self.value, device="cpu"), self.value))


@dataclass(frozen=True)
class Written:
    """An item that was written."""

    item: Item
    where: ByteRange


def items_of(sharded_state_dict: ShardedStateDict, *, allow_pickle: bool = False) -> list[Item]:
    """Return what this rank writes: its main replicas.

    Raises:
        UnsupportedValue: a load without ``allow_pickle`` would refuse an object.
    """
    found: list[Item] = []
    for leaf in nested_values(sharded_state_dict):
        if not is_main_replica(leaf.replica_id):
            continue
        if isinstance(leaf, ShardedObject):
            found.append(Item(leaf.unique_key, pickled([leaf.data], leaf.unique_key, allow_pickle=allow_pickle)))
        elif isinstance(leaf, ShardedTensor):
            found += _items_of(leaf)
    return found


def _items_of(tensor: ShardedTensor) -> Iterator[Item]:
    """Yield the items of a tensor.

    A range of a flattened part of a regular grid is stored as Megatron Core stored it until version 0.15: a tensor of
    shape [x, y] that is cut into 4 parts along its first axis is stored with the shape [4, 1, n], where n = x / 4 * y.
    """
    if tensor.flattened_range is None or tensor.axis_fragmentations is None:
        for box, memory in pieces_of(tensor):
            if not box.volume and 0 not in tensor.global_shape:
                continue  # .metadata has one entry for each offset
            yield Item(tensor.key, memory, box, tensor.global_shape)
        return
    start, stop = tensor.flattened_range.start, tensor.flattened_range.stop
    if start < stop:
        data = local_data(tensor)
        ones = (1,) * len(tensor.global_shape)
        box = Box((*tensor.local_chunk_offset_in_global(), start), (*ones, stop - start))
        shape = (*tensor.axis_fragmentations, math.prod(tensor.local_shape))
        yield Item(tensor.key, data.view(box.shape), box, shape, tensor.global_shape)


def write_items(
    path: Path, rank: int, items: Iterable[Item], files: int, separation_hint: str | None = None
) -> list[Written]:
    """Write items to at most ``files`` files, each on a thread of its own. They are on disk when the call returns.

    Args:
        path: the directory.
        rank: of this process.
        items: what it writes.
        files: number of files, at least 2 with ``separation_hint``.
        separation_hint: items whose keys begin with it go into files of their own, whose names begin with it too.
    """
    if separation_hint is None:
        used = [("", bucket) for bucket in _buckets(items, files)]
    else:
        apart: dict[bool, list[Item]] = {False: [], True: []}
        for item in items:
            apart[item.key.startswith(separation_hint)].append(item)
        prefixes = {False: "", True: separation_hint}
        used = [(prefixes[kind], bucket) for kind, found in apart.items() for bucket in _buckets(found, files // 2)]
    with ThreadPoolExecutor(max(len(used), 1), "keepstep-save") as pool:
        running = [
            pool.submit(_write_file, path, f"{prefix}__{rank}_{number}.distcp", bucket)
            for number, (prefix, bucket) in enumerate(used)
        ]
        return [written for one in running for written in one.result()]


def _buckets(items: Iterable[Item], count: int) -> list[list[Item]]:
    """Return the items in at most ``count`` lists of similar sizes."""
    buckets: list[list[Item]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=lambda one: one.nbytes, reverse=True):
        smallest = sizes.index(min(sizes))
        buckets[smallest].append(item)
        sizes[smallest] += item.nbytes
    return [bucket for bucket in buckets if bucket]


def _write_file(path: Path, name: str, items: list[Item]) -> list[Written]:
    found = []
    with (path / name).open("wb") as file:
        for item in items:
            start = file.tell()
            _write_item(file, item)
            found.append(Written(item, ByteRange(name, start, file.tell() - start)))
        file.flush()
        os.fsync(file.fileno())
    return found


def _write_item(file: IO[bytes], item: Item) -> None:
    if item.box is None:
        file.write(item.value)
        return
    tensor = item.value.cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
        # all of the storage would be written
        tensor = copy_elements(torch.empty(tensor.shape, dtype=tensor.dtype), tensor)
    write_pickled(tensor, file, f"ShardedTensor {item.key!r}")


@dataclass(frozen=True)
class RankPlan:
    """The parts that a rank has written, in the order of their keys, and their places."""

    parts: bytes
    """Keys, and boxes of tensors. Equal for each save of a state with the same structure and sharding."""
    places: bytes
    """For each part: file, offset, and length."""

    @property
    def digest(self) -> bytes:
        return blake2b(self.parts + self.places, digest_size=16).digest()

    def packed(self, known: RankPlan | None) -> bytes:
        """Return bytes for the other ranks, without what equals ``known``, a plan that rank 0 should have too."""
        parts = None if known is not None and known.parts == self.parts else self.parts
        places = None if known is not None and known.places == self.places else self.places
        packed: bytes = msgpack.packb((b"" if known is None else known.digest, parts, places))
        return packed


_Facts: TypeAlias = tuple[str, Sizes, Sizes, Sizes, Sizes | None] | tuple[()]
"""Of a part of a tensor: name of its dtype, shape as stored, offset and shape of the part, and shape of the global
tensor if it differs. Empty: an object."""
_Row: TypeAlias = tuple[str, _Facts, ByteRange]


def plan_of(written: Iterable[Written]) -> RankPlan:
    """Return the plan of a rank that has written these items."""
    return _plan((one.item.key, _facts(one.item), one.where) for one in written)


def _facts(item: Item) -> _Facts:
    if item.box is None:
        return ()
    return TORCH_DTYPE_NAMES[item.value.dtype], item.shape, item.box.offset, item.box.shape, item.original


def _plan(rows: Iterable[_Row]) -> RankPlan:
    ordered = sorted(rows, key=lambda row: (row[0], row[1][2:3]))
    parts = [(key, *facts) for key, facts, _ in ordered]
    return RankPlan(msgpack.packb(parts), msgpack.packb([astuple(where) for *_, where in ordered]))


def plans_of(content: DcpContent) -> list[RankPlan]:
    """Return the plan of each rank that wrote a checkpoint, as the names of its files tell. Inverse of ``merged``."""
    found: defaultdict[int, list[_Row]] = defaultdict(list)
    for key, tensor in content.tensors.items():
        dtype, original = TORCH_DTYPE_NAMES[tensor.dtype], content.flattened.get(key)
        for box, where in tensor.shards.items():
            found[_rank_of(where)].append((key, (dtype, tensor.shape, box.offset, box.shape, original), where))
    for key, where in content.objects.items():
        found[_rank_of(where)].append((key, (), where))
    return [_plan(found[rank]) for rank in range(max(found, default=-1) + 1)]


def _rank_of(where: ByteRange) -> int:
    name = _FILE.fullmatch(where.file)
    return int(name[1]) if name else 0


def unpack_plan(packed: bytes, known: RankPlan | None) -> RankPlan | None:
    """Return a plan. Inverse of ``RankPlan.packed``. None: ``known`` is not the plan that the other rank knows."""
    digest, parts, places = msgpack.unpackb(packed)
    if parts is not None and places is not None:
        return RankPlan(parts, places)
    if known is None or known.digest != digest:
        return None
    return RankPlan(known.parts if parts is None else parts, known.places if places is None else places)


def has_known_parts(packed: bytes) -> bool:
    """Return whether a packed plan has the parts of the plan that the other rank knows."""
    return msgpack.unpackb(packed)[1] is None


def merged(plans: Iterable[RankPlan]) -> DcpContent:
    """Return what all ranks have written. Raises ``CheckpointingException`` if they contradict each other."""
    tensors: dict[str, ForeignTensor] = {}
    objects: dict[str, ByteRange] = {}
    flattened: dict[str, Sizes] = {}
    for rank, plan in enumerate(plans):
        parts, places = (msgpack.unpackb(one, use_list=False) for one in (plan.parts, plan.places))
        for (key, *facts), place in zip(parts, places, strict=True):
            where = ByteRange(*place)
            if not facts:
                objects[key] = where
                continue
            dtype, shape, offset, sizes, original = facts
            known = tensors.setdefault(key, ForeignTensor(TORCH_DTYPES[dtype], shape, {}))
            if (known.dtype, known.shape) != (TORCH_DTYPES[dtype], shape):
                raise CheckpointingException(
                    f"{key} is stored as a tensor of {known.dtype} and shape {known.shape}, but rank {rank} has parts "
                    f"of {dtype} and {shape}: give all its parts the same dtype, shape and flattened ranges"
                )
            known.shards[Box(offset, sizes)] = where
            if original is not None:
                flattened[key] = original
    return DcpContent(tensors, objects, {}, flattened)


def without_prefix(content: DcpContent, key_prefix: str) -> DcpContent:
    """Return a content without the values whose keys begin with a prefix."""

    def kept(values: dict[str, T]) -> dict[str, T]:
        return {key: one for key, one in values.items() if not key.startswith(key_prefix)}

    return DcpContent(*(kept(getattr(content, one.name)) for one in fields(content)))


def sizes_of_files(content: DcpContent) -> Counter[str]:
    """Return the bytes of the values in each file."""
    sizes = Counter[str]()
    for where in (*content.objects.values(), *(one for of in content.tensors.values() for one in of.shards.values())):
        sizes[where.file] += where.length
    return sizes


def remove_files(path: Path) -> bool:
    """Remove the files of a save that did not finish. Return whether it had any."""
    old = [one for one in path.iterdir() if _FILE.fullmatch(one.name) or one.name in (METADATA, COMMON_STATE_FNAME)]
    for one in old:
        one.unlink(missing_ok=True)
    return bool(old)
