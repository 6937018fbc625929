"""The keys of a stored checkpoint, with those of torch.distributed.checkpoint, from the manifests of its ranks.

``keepstep.checkpoint.stored`` reads the same for workers. docs/checkpoint-format.md describes both forms of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.boxes import Box, Sizes, uncovered, whole
from keepstep_mesh.protocol.manifest import glimpse
from keepstep_mesh.protocol.state_content import BYTES, NUMPY, PARTS, Content, TensorEntry, plain_container

FORMAT = "keepstep-checkpoint-1"
"""Marks the tree of a rank of ``keepstep.checkpoint``. Other trees are those of a state."""
MAX_KEY_BYTES = 1024
"""Of an integer that is a key. Python does not convert much longer ones to text."""
Path = tuple[str | int, ...]
"""Keys of dicts, and positions in lists."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A part of a tensor, in the pack of one rank."""

    rank: int
    entry: TensorEntry
    position: int
    """Of its first element in the pack, in bytes."""


@dataclass(slots=True)
class StoredTensor:
    """A tensor. Its shards do not overlap, and cover it."""

    dtype: str
    shape: Sizes
    shards: dict[Box, StoredShard] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is not a tensor."""

    rank: int
    node: Any
    """In the tree of its rank."""


@dataclass(slots=True)
class StoredKeys:
    """Values by key, and the path of each key in the state that was saved."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def read_keys(contents: Sequence[Content]) -> StoredKeys:
    """Return the keys of a checkpoint whose ranks have ``contents``.

    Raises:
        ManifestError: the contents are invalid, contradict each other, or a tensor is incomplete.
    """
    reading = _Reading()
    for rank, content in enumerate(contents):
        reading.add(rank, content)
    keys = reading.keys
    for key, tensor in keys.tensors.items():
        if key in keys.objects:
            raise ManifestError(f"{key} is a tensor at one rank and another value at rank {keys.objects[key].rank}")
        if problem := uncovered(tensor.shape, list(tensor.shards)):
            raise ManifestError(f"{key} is incomplete: {problem}")
    for key in (*keys.tensors, *keys.objects):
        keys.paths.setdefault(key, (key,))
    return keys


class _Reading:
    def __init__(self) -> None:
        self.keys = StoredKeys()
        self._rank = 0
        self._content = Content(None, (), ())
        self._positions: list[int] = []

    def add(self, rank: int, content: Content) -> None:
        """Add what one rank has stored."""
        self._rank, self._content, self._positions = rank, content, content.positions()
        top = {key: node for key, node in pairs(content.tree) if type(key) is str} if is_dict(content.tree) else {}
        if top.get("format") != FORMAT:
            self._add_state(content.tree, ())
            return
        for key, node in pairs(top.get("tensors")):
            for shard in node[1:] if kind_of(node) == "list" else [node]:
                self._add_shard(_text(key), shard)
        for key, node in pairs(top.get("objects")):
            self.keys.objects.setdefault(_text(key), StoredObject(rank, node))
        for key, node in pairs(top.get("paths")):
            self.keys.paths.setdefault(_text(key), tuple(_steps(node, _text(key))))

    def _add_state(self, node: Any, path: Path) -> None:
        """Add the leaves of the tree of a state."""
        node = plain_container(node)
        if is_dict(node) and (pairs(node) or not path):
            for key, item in pairs(node):
                self._add_state(item, (*path, _text(plain_key(key))))
            return
        if kind_of(node) == "list" and any(_is_part(item) for item in node[1:]):
            for number, item in enumerate(node[1:]):
                self._add_state(item, (*path, number))
            return
        key = ".".join(map(str, path))
        self.keys.paths.setdefault(key, path)
        if kind_of(node) == "tensor" and is_tensor(self._content.tensors[node[1]]):
            self._add_shard(key, node)
        else:
            self.keys.objects.setdefault(key, StoredObject(self._rank, node))

    def _add_shard(self, key: str, node: Any) -> None:
        if kind_of(node) != "tensor" or not is_tensor(entry := self._content.tensors[node[1]]):
            raise ManifestError(f"{key} is no tensor")
        shape = entry.shape if entry.sharding is None else entry.sharding.global_shape
        box = whole(shape) if entry.sharding is None else Box(entry.sharding.global_offset, entry.shape)
        tensor = self.keys.tensors.setdefault(key, StoredTensor(entry.dtype, shape))
        if (tensor.dtype, tensor.shape) != (entry.dtype, shape) or not len(box.offset) == len(box.shape) == len(shape):
            raise ManifestError(
                f"{key} is a {tensor.dtype} tensor of shape {tensor.shape} at one rank, and a {entry.dtype} tensor of "
                f"shape {shape} at rank {self._rank}"
            )
        tensor.shards.setdefault(box, StoredShard(self._rank, entry, self._positions[entry.region] + entry.offset))


# ---- nodes of a tree


def is_tensor(entry: TensorEntry) -> bool:
    """Return whether the entry is a tensor of torch."""
    return entry.dtype != BYTES and not entry.dtype.startswith(NUMPY)


def kind_of(node: Any) -> str | None:
    """Return the type of a node, such as ``dict``; None: the node stands for itself."""
    return node[0] if type(node) is list and node and type(node[0]) is str else None


def is_dict(node: Any) -> bool:
    """Return whether a node is a dict."""
    return kind_of(node) in ("dict", "odict")


def pairs(node: Any) -> list[tuple[Any, Any]]:
    """Return the nodes of the keys and values of a dict. Raises ``ManifestError``."""
    if not is_dict(node):
        raise ManifestError(f"expected a dict in the tree, not {glimpse(node)}")
    items = node[1:] if node[0] == "dict" else node[2:]
    if len(items) % 2:
        raise ManifestError("a dict of the tree has a key without a value")
    return list(zip(items[::2], items[1::2], strict=True))


def plain_key(node: Any) -> Any:
    """Return the key of a dict, as far as its text needs it: a tuple, or a scalar. Raises ``ManifestError``."""
    match node:
        case ["tuple", *items]:
            return tuple(map(plain_key, items))
        case ["int", bytes(data)] if len(data) <= MAX_KEY_BYTES:
            return int.from_bytes(data, "little", signed=True)
        case ["int", *fields]:
            found = f"{len(fields[0])} bytes" if fields and type(fields[0]) is bytes else str(fields)[:40]
            raise ManifestError(f"invalid integer as a key in the tree: {found}, expected 1 to {MAX_KEY_BYTES} bytes")
    return node


def _text(key: Any) -> str:
    return key if type(key) is str else str(key)


def _steps(node: Any, key: str) -> Iterator[str | int]:
    """Yield the steps of a packed path: an integer is a position, a tuple has a key that is no string."""
    if kind_of(node) != "tuple":
        raise ManifestError(f"invalid path of {key} in the tree: expected a tuple")
    for step in node[1:]:
        match step:
            case str() | int():
                yield step
            case ["tuple", of_dict]:
                yield _text(plain_key(of_dict))
            case _:
                raise ManifestError(f"invalid path of {key} in the tree: expected a key or index, got {glimpse(step)}")


def _is_part(node: Any) -> bool:
    node = plain_container(node)
    kind = kind_of(node)
    return kind in PARTS or (kind == "list" and any(_is_part(one) for one in node[1:]))
