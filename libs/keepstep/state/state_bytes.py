"""Conversion of a state to (manifest, pack) in memory, and back. docs/checkpoint-format.md describes the format."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.state.errors import TransferError
from keepstep.state.pack import Pack
from keepstep.state.pack_layout import describe
from keepstep.state.restoring import Destination
from keepstep.state.state_manifest import build_manifest, read_manifest
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Origin, chunk_digest, chunk_digests, root_digest
from keepstep_mesh.protocol.state_content import pack_content


def save_state(state: Any, origin: Origin | None = None) -> tuple[bytes, memoryview]:
    """Return the manifest and the pack of ``state``.

    Raises:
        UnsupportedValue: the state has a value that cannot be stored; the error names its path.
    """
    layout = describe(state)
    pack = torch.empty(layout.content.positions()[-1], dtype=torch.uint8)
    layout.copy_into(pack)
    view = pack.numpy().data
    return build_manifest(origin or Origin(), pack_content(layout.content), chunk_digests([view])), view


def state_root(state: Any) -> bytes:
    """Return a digest of ``state`` that is equal for equal states: in any order of keys, and in any memory layout.

    Copies only CUDA tensors, one chunk at a time, and tensors whose elements are not in their order in memory, one
    tensor at a time.

    Raises:
        UnsupportedValue: the state has a value that cannot be stored; the error names its path.
    """
    pack = Pack(describe(state, by_value=True))
    pieces = (piece for number in range(pack.chunks) for piece in pack.pieces(number))
    return root_digest(pack.content_bytes, chunk_digests(pieces))


def load_state(manifest: bytes, pack: bytes | memoryview, into: Any = None) -> Any:
    """Verify every chunk, and return the state.

    Args:
        into: see ``CheckpointTransport.recv_checkpoint``.

    Raises:
        ManifestError: the manifest is invalid.
        TransferError: the pack does not match the manifest.
    """
    known = read_manifest(manifest)
    pack = memoryview(pack)
    if pack.nbytes != known.pack_bytes:
        raise TransferError(f"wrong length of the pack: {pack.nbytes} bytes, expected {known.pack_bytes}")
    for chunk, digest in enumerate(known.chunk_digests):
        if chunk_digest(pack[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]) != digest:
            raise TransferError(f"chunk {chunk} is damaged: its digest is not the one in the manifest")
    destination = Destination(known.content, into)
    for chunk in range(len(known.chunk_digests)):
        start = chunk * CHUNK_BYTES
        for segment in destination.segments(chunk):
            segment[:] = pack[start : start + segment.nbytes]
            start += segment.nbytes
    return destination.result()
