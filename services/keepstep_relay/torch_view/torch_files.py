"""The directory of torch.distributed.checkpoint that a stored checkpoint stands for: ``.metadata``, and a file a rank.

A tensor in a file is a pickle that describes it, followed by its bytes, which stay in the pack: torch.save wrote this
form until torch 1.6, and ``torch.load(weights_only=True)`` reads it. It has no check sums, unlike the newer form, which
would need all bytes of a tensor before the first is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.boxes import Box
from keepstep_mesh.protocol.manifest import chunk_digest
from keepstep_mesh.protocol.state_content import Content
from keepstep_mesh.protocol.stored_keys import Index, TensorShards, is_dict, pairs, read_keys
from keepstep_relay.torch_view.node_values import NodeValues, extent, read_key, tensor_value, torch_dtype, torch_size
from keepstep_relay.torch_view.pickle_writer import (
    Call,
    Global,
    Instance,
    Items,
    PackRange,
    Segment,
    SegmentWriter,
    cut,
    write_pickle,
)

METADATA = ".metadata"
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
"""First values of a file of torch.save before torch 1.6."""
_SYSTEM = {"protocol_version": _VERSION, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
_MODULE = "torch.distributed.checkpoint.metadata"
_POSITION = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")


def file_name(rank: int, version: int) -> str:
    """Return the name of the file of a rank, as torch names it; torch has the number of a file for ``version``."""
    return f"__{rank}_{version}.distcp"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file, as literal bytes and ranges of packs."""

    segments: tuple[Segment, ...]
    size: int

    def cut(self, first: int, end: int) -> Iterator[Segment]:
        """Yield its bytes from ``first`` to before ``end``."""
        return cut(self.segments, first, end)


@dataclass(frozen=True, slots=True)
class TorchDirectory:
    """All files, by name.

    Attributes:
        files: the files.
        literal_bytes: bytes that are not in packs.
        digest: of the whole directory.
    """

    files: Mapping[str, TorchFile]
    literal_bytes: int
    digest: bytes


def torch_directory(roots: Sequence[bytes], contents: Sequence[Content], version: int = 0) -> TorchDirectory:
    """Return the directory of a checkpoint.

    Args:
        roots: root digest of the manifest of each rank.
        contents: content of the manifest of each rank.
        version: of the checkpoint. The files are named for it: a reader never mixes those of two versions.

    Raises:
        ManifestError: see ``read_keys``; or a value is invalid.
    """
    writing = _Writing(contents, version)
    files = {name: TorchFile(tuple(one.segments()), one.size) for name, one in writing.files().items()}
    literal = sum(len(part) for one in files.values() for part in one.segments if isinstance(part, bytes))
    return TorchDirectory(files, literal, chunk_digest(b"torch files 1 %d" % version + b"".join(roots)))


class _Writing:
    def __init__(self, contents: Sequence[Content], version: int) -> None:
        self._contents = contents
        self._names = [file_name(rank, version) for rank in range(len(contents))]
        self._keys = read_keys(contents, read_key)
        self._writers = [SegmentWriter() for _ in contents]
        self._where: list[tuple[Instance, Instance]] = []
        """Index and position of each item."""

    def files(self) -> dict[str, SegmentWriter]:
        described: dict[str, Any] = {}
        for key, tensor in self._keys.tensors.items():
            described[key] = self._tensor(key, tensor)
        for key, stored in self._keys.objects.items():
            if is_dict(stored.node) and not pairs(stored.node, key):
                continue  # an empty dict: torch stores none, and takes a checkpoint that has one for one of torch 2.3
            described[key] = Instance(Global(_MODULE, "BytesStorageMetadata"))
            values = NodeValues(stored.rank, self._contents[stored.rank])
            try:
                value = values.value(stored.node)
            except ManifestError as error:
                raise ManifestError(f"{key} cannot be shown to torch: {error}") from error
            self._item(stored.rank, key, None, value, values.storages)
        metadata = SegmentWriter()
        write_pickle(metadata, self._metadata(described))
        return {METADATA: metadata, **dict(zip(self._names, self._writers, strict=True))}

    def _tensor(self, key: str, tensor: TensorShards) -> Instance:
        for box, shard in tensor.by_box.items():
            where = PackRange(shard.rank, shard.position, extent(shard.entry))
            self._item(shard.rank, key, torch_size(box.offset), tensor_value(shard.entry, "0"), [where])
        strided = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        contiguous = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
        properties = (torch_dtype(tensor.dtype), strided, False, contiguous, False)
        return Instance(
            Global(_MODULE, "TensorStorageMetadata"),
            {
                "properties": Instance(Global(_MODULE, "TensorProperties"), properties),
                "size": torch_size(tensor.shape),
                "chunks": [_chunk(box) for box in tensor.by_box],
            },
        )

    def _item(self, rank: int, key: str, offset: Call | None, value: Any, storages: Sequence[PackRange]) -> None:
        """Write one item to the file of its rank, and note where it is."""
        file = self._writers[rank]
        start = file.size
        for one in (_MAGIC, _VERSION, _SYSTEM, value, [str(number) for number in range(len(storages))]):
            write_pickle(file, one)
        for where in storages:
            file.write(struct.pack("<q", where.length))
            file.refer(where)
        index = Instance(Global(_MODULE, "MetadataIndex"), {"fqn": key, "offset": offset, "index": None})
        position = {"relative_path": self._names[rank], "offset": start, "length": file.size - start}
        self._where.append((index, Instance(_POSITION, position)))

    def _metadata(self, described: Mapping[str, Any]) -> Instance:
        paths = {
            key: tuple([step.number if isinstance(step, Index) else str(step) for step in self._keys.paths[key]])
            for key in described
        }
        return Instance(
            Global(_MODULE, "Metadata"),
            {"state_dict_metadata": dict(described), "planner_data": paths, "storage_data": Items(tuple(self._where))},
        )


def _chunk(box: Box) -> Instance:
    state = {"offsets": torch_size(box.offset), "sizes": torch_size(box.shape)}
    return Instance(Global(_MODULE, "ChunkStorageMetadata"), state)
