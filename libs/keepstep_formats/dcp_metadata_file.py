"""The file ``.metadata``, which plain ``dcp.load`` and Megatron Core read."""

from __future__ import annotations

from pathlib import Path

import torch
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

from keepstep_formats.dcp_metadata import ORIGINAL_SHAPE, ByteRange, DcpContent
from keepstep_formats.foreign_errors import ForeignCheckpointError
from keepstep_formats.pickled_items import pickled_metadata
from keepstep_mesh.protocol.boxes import uncovered


def dcp_metadata_file(directory: Path, content: DcpContent) -> bytes:
    """Return the bytes of ``.metadata``. Inverse of ``read_dcp_metadata``.

    Args:
        directory: the checkpoint.
        content: its tensors and objects. ``paths`` are not written.

    Raises:
        ForeignCheckpointError: a tensor is incomplete.
    """
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in content.tensors.items():
        if problem := uncovered(tensor.shape, list(tensor.shards)):
            raise ForeignCheckpointError(f"tensor {key!r} is incomplete: {problem}")
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in tensor.shards]
        items[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
        for number, (box, where) in enumerate(tensor.shards.items()):
            stored[MetadataIndex(key, torch.Size(box.offset), number)] = _info(where)
    for key, where in content.objects.items():
        items[key] = BytesStorageMetadata()
        stored[MetadataIndex(key)] = _info(where)
    metadata = Metadata(items, {}, stored, StorageMeta(checkpoint_id=str(directory)))
    if content.flattened:
        shapes = {key: {ORIGINAL_SHAPE: shape} for key, shape in content.flattened.items()}
        metadata.mcore_data = shapes  # type: ignore[attr-defined]  # where Megatron Core until 0.15 looks for it
    return pickled_metadata(metadata)


def _info(where: ByteRange) -> _StorageInfo:
    return _StorageInfo(where.file, where.offset, where.length)
