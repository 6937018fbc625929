"""Keys of a stored checkpoint: its tensors with their shards, its other values, and the path of each in the state.

Workers and relays read them from the contents of the manifests of all ranks. docs/checkpoint-format.md describes both
forms of a tree: that of ``keepstep.checkpoint``, and that of any state, whose leaves get the keys of
torch.distributed.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from keepstep_mesh.errors import ContradictingRanks, ManifestError
from keepstep_mesh.protocol.boxes import Box, Sizes, uncovered, whole
from keepstep_mesh.protocol.manifest import glimpse
from keepstep_mesh.protocol.state_content import BYTES, NUMPY, PARTS, Content, TensorEntry, plain_container

FORMAT = "keepstep-checkpoint-1"
"""Marks the tree of a rank of ``keepstep.checkpoint``."""


@dataclass(frozen=True, slots=True)
class Index:
    """A position in a list. All other steps of a path are keys of dicts."""

    number: int


Path: TypeAlias = tuple[Any, ...]
ReadKey: TypeAlias = Callable[[Any, str], Any]
"""Returns the key of a dict from its node, and the name of the node for errors. Raises ``ManifestError``."""


def key_of(path: Path) -> str:
    """Return the key of the leaf at ``path``."""
    return ".".join(str(step.number if isinstance(step, Index) else step) for step in path)


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A part of a tensor, in the pack of one rank."""

    rank: int
    box: Box
    entry: TensorEntry
    position: int
    """Of its first element in the pack, in bytes."""


@dataclass(slots=True)
class TensorShards:
    """A tensor. Its shards do not overlap, and cover it. If several ranks stored one, it is that of the lowest rank."""

    dtype: str
    shape: Sizes
    by_box: dict[Box, StoredShard] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.dtype} tensor of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is not a tensor. It may contain tensors."""

    rank: int
    node: Any
    """In the tree of the manifest of ``rank``."""


@dataclass(slots=True)
class StoredKeys:
    """Values by key, and the path of each key in the state that was saved."""

    tensors: dict[str, TensorShards] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def read_keys(contents: Sequence[Content], read_key: ReadKey) -> StoredKeys:
    """Return the keys of a checkpoint.

    Args:
        contents: of the manifest of each rank.
        read_key: reads keys of dicts in the state.

    Raises:
        ContradictingRanks: the contents contradict each other, or a tensor is incomplete.
        ManifestError: a content is invalid.
    """
    keys = StoredKeys()
    for rank, content in enumerate(contents):
        _Reading(keys, rank, content, read_key).add()
    for key, tensor in keys.tensors.items():
        if key in keys.objects:
            other = keys.objects[key].rank
            raise ContradictingRanks(f"{key} is a tensor at one rank and another value at rank {other}")
        if problem := uncovered(tensor.shape, list(tensor.by_box)):
            raise ContradictingRanks(f"{key} is incomplete in this checkpoint: {problem}")
    for key in (*keys.tensors, *keys.objects):
        keys.paths.setdefault(key, (key,))
    return keys


class _Reading:
    """Adds what one rank has stored to ``keys``."""

    def __init__(self, keys: StoredKeys, rank: int, content: Content, read_key: ReadKey) -> None:
        self._keys = keys
        self._rank = rank
        self._content = content
        self._positions = content.positions()
        self._read_key = read_key

    def add(self) -> None:
        tree, where = self._content.tree, f"the tree of rank {self._rank}"
        top = self._pairs(tree, where) if is_dict(tree) else {}
        if top.get("format") != FORMAT:
            self._add_state(tree, ())
            return
        for key, node in self._section(top, "tensors").items():
            shards = node[1:] if kind_of(node) == "list" else [node]
            if not shards:
                raise ManifestError(f"tensor {key} has no shard")
            for one in shards:
                self._add_shard(key, one)
        for key, node in self._section(top, "objects").items():
            self._keys.objects.setdefault(key, StoredObject(self._rank, node))
        for key, node in self._section(top, "paths").items():
            self._keys.paths.setdefault(key, self._path(key, node))

    def _section(self, top: dict[Any, Any], name: str) -> dict[str, Any]:
        """Return the items of a dict that every tree of ``FORMAT`` has, by key."""
        if kind_of(node := top.get(name)) != "dict":
            raise ManifestError(
                f"the tree of rank {self._rank} has no dict of {name}: the manifest is damaged, save it again"
            )
        found = self._pairs(node, f"{name} of rank {self._rank}")
        for key in found:
            if type(key) is not str:
                raise ManifestError(f"{name} of rank {self._rank} has the key {str(key)[:100]!r}, expected a string")
        return found

    def _pairs(self, node: Any, what: str) -> dict[Any, Any]:
        """Return the items of a dict node, with decoded keys."""
        try:
            return {self._read_key(key, f"key of {what}"): item for key, item in pairs(node, what)}
        except TypeError as error:
            raise ManifestError(f"{what} has a key that cannot be one: {error}") from error

    def _path(self, key: str, node: Any) -> Path:
        """Return a path. In its node, an integer is a position, and a tuple has a key that is no string."""
        if kind_of(node) != "tuple" or len(node) == 1:
            raise ManifestError(f"path of {key} is {glimpse(node)}, expected a tuple of its keys")
        return tuple([self._step(step, key) for step in node[1:]])

    def _step(self, step: Any, key: str) -> Any:
        if type(step) is int:
            return Index(step)
        if type(step) is str:
            return step
        if kind_of(step) == "tuple" and len(step) == 2:
            return self._read_key(step[1], f"path of {key}")
        raise ManifestError(f"path of {key} is invalid: expected a key or index, got {glimpse(step)}")

    def _add_state(self, node: Any, path: Path) -> None:
        """Add the leaves of the tree of any state, with the keys that a flattened state dict has."""
        node = plain_container(node)
        if is_dict(node) and (len(node) > (1 if node[0] == "dict" else 2) or not path):
            for key, item in self._pairs(node, key_of(path)).items():
                self._add_state(item, (*path, key))
            return
        if kind_of(node) == "list" and any(self._is_part(item) for item in node[1:]):
            for number, item in enumerate(node[1:]):
                self._add_state(item, (*path, Index(number)))
            return
        key = key_of(path)
        self._keys.paths.setdefault(key, path)
        if kind_of(node) == "tensor" and is_tensor(self._content.tensors[node[1]]):
            self._add_shard(key, node)
        else:
            self._keys.objects.setdefault(key, StoredObject(self._rank, node))

    def _is_part(self, node: Any) -> bool:
        """Return whether a list with this item is flattened. Bytes and NumPy arrays are stored as tensors are."""
        node = plain_container(node)
        kind = kind_of(node)
        if kind == "tensor":
            return is_tensor(self._content.tensors[node[1]])
        return kind in PARTS or (kind == "list" and any(self._is_part(one) for one in node[1:]))

    def _add_shard(self, key: str, node: Any) -> None:
        if kind_of(node) != "tensor" or not is_tensor(entry := self._content.tensors[node[1]]):
            raise ManifestError(f"{key} of rank {self._rank} is {glimpse(node)}, expected a tensor")
        shape = entry.shape if entry.sharding is None else entry.sharding.global_shape
        box = whole(shape) if entry.sharding is None else Box(entry.sharding.global_offset, entry.shape)
        tensor = self._keys.tensors.setdefault(key, TensorShards(entry.dtype, shape))
        if (tensor.dtype, tensor.shape) != (entry.dtype, shape) or not len(box.offset) == len(box.shape) == len(shape):
            raise ContradictingRanks(
                f"{key} is a {tensor} at one rank, and a {entry.dtype} tensor of shape {shape} at rank {self._rank}"
            )
        position = self._positions[entry.region] + entry.offset
        tensor.by_box.setdefault(box, StoredShard(self._rank, box, entry, position))


# ---- nodes of a tree


def kind_of(node: Any) -> str | None:
    """Return the type of a node, such as ``dict``; None: the node stands for itself."""
    return node[0] if type(node) is list and node and type(node[0]) is str else None


def is_dict(node: Any) -> bool:
    """Return whether a node is a dict."""
    return kind_of(node) in ("dict", "odict")


def is_tensor(entry: TensorEntry) -> bool:
    """Return whether the entry is a tensor of torch."""
    return entry.dtype != BYTES and not entry.dtype.startswith(NUMPY)


def pairs(node: Any, what: str) -> list[tuple[Any, Any]]:
    """Return the nodes of the keys and values of a dict. Raises ``ManifestError``."""
    items = node[1:] if node[0] == "dict" else node[2:]
    if len(items) % 2:
        raise ManifestError(f"{what} has a key without a value")
    return list(zip(items[::2], items[1::2], strict=True))
