"""The manifest of a state: how a worker makes and reads it. docs/checkpoint-format.md describes the format.

A manifest from the network is untrusted. Sizes, indices, strides and nesting are checked before memory is allocated for
them. ``keepstep_mesh.protocol`` has its envelope and its content, which relays read too.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.state.errors import UnsupportedValue
from keepstep.state.values.leaves import TORCH_DTYPES, numpy_dtype
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES, Origin, Parts, pack_envelope, read_envelope
from keepstep_mesh.protocol.state_content import BYTES, NUMPY, Content, unpack_content


@dataclass(frozen=True)
class Manifest:
    """A decoded manifest."""

    origin: Origin
    content: Content
    content_bytes: bytes
    """``content`` as sent. The root digest covers these bytes."""
    chunk_digests: tuple[bytes, ...]
    root: bytes

    @property
    def pack_bytes(self) -> int:
        return self.content.positions()[-1]


def build_manifest(origin: Origin, content_bytes: bytes, digests: bytes, parts: Parts | None = None) -> bytes:
    """Return the manifest of a pack.

    Args:
        origin: of the state.
        content_bytes: its content.
        digests: of the chunks of its pack, one after the other.
        parts: digests of their parts, which are left out if the manifest is too large with them.

    Raises:
        UnsupportedValue: the manifest is larger than the limit.
    """
    manifest = pack_envelope(origin, content_bytes, digests, parts)
    if parts is not None and len(manifest) > MAX_MANIFEST_BYTES:
        manifest = pack_envelope(origin, content_bytes, digests)
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise UnsupportedValue(
            f"structure of the state too large: {len(manifest)} bytes (limit {MAX_MANIFEST_BYTES}); "
            f"store bulk data in tensors, numpy arrays or bytes"
        )
    return manifest


def read_manifest(data: bytes) -> Manifest:
    """Decode and check a manifest from an untrusted source. Raises ``ManifestError``."""
    envelope = read_envelope(data)
    content = read_content(envelope.content_bytes)
    return Manifest(envelope.origin, content, envelope.content_bytes, envelope.chunk_digests, envelope.root)


def read_content(content_bytes: bytes) -> Content:
    """Decode and check the content of a manifest from an untrusted source. Raises ``ManifestError``."""
    content = unpack_content(content_bytes)
    for dtype in {entry.dtype for entry in content.tensors} - TORCH_DTYPES.keys() - {BYTES}:
        if not dtype.startswith(NUMPY):
            raise ManifestError(f"this torch has no dtype {dtype}")
        numpy_dtype(dtype.removeprefix(NUMPY))
    return content
