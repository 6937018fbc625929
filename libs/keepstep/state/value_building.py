"""Build the values of a tree of nodes, with the tensors that the caller delivers.

``pack_layout`` describes a state as such a tree. The *counterpart* of a value is what ``into``, the state of the
receiver, has in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.state.errors import StateMismatch
from keepstep.state.values.known_classes import class_name, find_class
from keepstep.state.values.leaves import decode_leaf
from keepstep.state.values.quantized_tensors import quantized_tensor
from keepstep.state.values.sharding import is_dtensor, sharding_of
from keepstep.state.values.tensor_subclasses import Wrapped, is_wrapper
from keepstep.state.values.typed_values import TYPED, build_typed
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import glimpse
from keepstep_mesh.protocol.state_content import Sharding, read_sharding

ABSENT = object()
"""The counterpart of a value that has none."""

Deliver = Callable[[int, Any, str], Any]
"""Returns a tensor by its index, with its counterpart in ``into`` and its path. None: targets are looked for."""
DeliverShard = Callable[[Sharding, Any, Any, str], Any]
"""Returns the DTensor of a shard that is a wrapper, with its counterpart in ``into`` or None, and its path."""


def _no_shard(_sharding: Sharding, _local: Any, _target: Any, path: str) -> Any:
    raise ManifestError(f"{path} is one shard of a wrapped tensor, where a whole value is expected")


def build_value(node: Any, into: Any, path: str, deliver: Deliver, deliver_shard: DeliverShard = _no_shard) -> Any:
    """Return the value of ``node``.

    Args:
        node: of a tree.
        into: its counterpart in the state of the receiver.
        path: of the value, for errors.
        deliver: returns the tensors.
        deliver_shard: returns DTensors whose shards are wrappers.

    Raises:
        ManifestError: the node is invalid.
        StateMismatch: the value does not fit this process, such as one of a class that it does not know.
    """
    return _Builder(deliver, deliver_shard).value(node, into, path)


@dataclass(frozen=True)
class _Builder:
    deliver: Deliver
    deliver_shard: DeliverShard

    def value(self, node: Any, into: Any, path: str) -> Any:
        if type(node) is not list or not node:
            return decode_leaf(node, path)
        kind = node[0]
        match kind:
            case "tensor":
                return self.deliver(node[1], into, path)
            case "list" | "tuple":
                known = into if isinstance(into, (list, tuple)) else ()
                items = [
                    self.value(item, known[index] if index < len(known) else ABSENT, f"{path}[{index}]")
                    for index, item in enumerate(node[1:])
                ]
                return items if kind == "list" else tuple(items)
            case "dict" | "odict":
                return self._dict(node, into, path)
            case "set" | "frozenset":
                own = _by_class(into if isinstance(into, (set, frozenset)) else ())
                items = [self._key(item, own, f"an element of {path}") for item in node[1:]]
                return set(items) if kind == "set" else frozenset(items)
            case "wrapped":
                return self._wrapped(node, into, path)
            case "shard":
                return self._shard(node, into, path)
            case "quantized":
                parts = [self.value(one, None, path) for one in node[1:]]
                is_search = len(parts) > 1 and parts[1] is None
                return None if is_search else quantized_tensor(parts, path)
        if type(kind) is str and kind in TYPED:
            return build_typed(node, None if into is ABSENT else into, path, self.value)
        return decode_leaf(node, path)

    def _dict(self, node: Any, into: Any, path: str) -> dict[Any, Any]:
        built: dict[Any, Any] = {}
        pairs = node[1:]
        if node[0] == "odict":
            built = OrderedDict()
            metadata = self.value(node[1] if len(node) > 1 else None, None, f"{path}._metadata")
            if metadata is not None:
                built._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001  # has the versions of torch's modules
            pairs = node[2:]
        if len(pairs) % 2:
            raise ManifestError(f"{path} has a key without a value")
        known = into if isinstance(into, dict) else {}
        own = _by_class(known)
        for key_node, item in zip(pairs[::2], pairs[1::2], strict=True):
            key = self._key(key_node, own, f"key of {path}")
            if key in built:
                raise ManifestError(f"{path} has the key {key!r} twice")
            built[key] = self.value(item, known.get(key, ABSENT), f"{path}[{key!r}]")
        return built

    def _key(self, node: Any, own: Mapping[str, Any], path: str) -> Any:
        """Return a key of a dict, or an element of a set. ``own``: keys here, by the names of their classes."""
        if type(node) is list and node and node[0] == "tuple":
            return tuple([self._key(item, own, path) for item in node[1:]])
        if type(node) is list and len(node) > 1 and type(node[0]) is str and node[0] in TYPED:
            key = build_typed(node, own.get(node[1]) if type(node[1]) is str else None, path, self.value)
            try:
                hash(key)
            except TypeError as error:
                raise ManifestError(f"{path} has no hash: {error}") from error
            return key
        return decode_leaf(node, path)

    def _wrapped(self, node: Any, into: Any, path: str) -> Any:
        """Return the wrapper, in the tensors of that of ``into`` where they fit: the same one if all do."""
        if len(node) < 5 or len(node) % 2 == 0 or not all(type(name) is str for name in node[5::2]):
            raise ManifestError(f"{path} is an invalid wrapped tensor: {glimpse(node[:5])}")
        _, name, size, stride, context = node[:5]
        if not all(type(sizes) is list and all(type(one) is int for one in sizes) for sizes in (size, stride)):
            raise ManifestError(f"{path} has an invalid shape or stride: {glimpse([size, stride])}")
        kind = find_class(name, torch.Tensor, into, path)
        own = Wrapped.of(into) if type(into) is kind and is_wrapper(into) else None
        inner_here = {} if own is None else own.inner
        built = Wrapped(
            kind,
            tuple(size),
            tuple(stride),
            self.value(context, None if own is None else own.context, f"{path} context"),
            {
                name: self.value(item, inner_here.get(name, ABSENT), f"{path}.{name}")
                for name, item in zip(node[5::2], node[6::2], strict=True)
            },
        )
        if any(one is None for one in built.inner.values()):
            return None  # targets are looked for
        if own is not None and _same_wrapper(own, built):
            return into
        return built.build(path)

    def _shard(self, node: Any, into: Any, path: str) -> Any:
        if len(node) != 7 or not all(type(one) is list and one[:1] == ["names"] for one in node[4:6]):
            raise ManifestError(f"{path} is an invalid shard: {glimpse(node[:6])}")
        sharding = read_sharding([*node[1:4], *(one[1:] for one in node[4:6])], path)
        target = None if is_absent(into) else into
        local = None if target is None else shard_here(sharding, target, path)
        built = self.value(node[6], local, path)
        return target if built is not None and built is local else self.deliver_shard(sharding, built, target, path)


def _by_class(values: Iterable[Any]) -> dict[str, Any]:
    """Return one value of each class that keys of a dict, and items of those that are tuples, have."""
    found: dict[str, Any] = {}
    for one in values:
        found[class_name(type(one))] = one
        if isinstance(one, tuple):
            found |= _by_class(one)
    return found


def _same_wrapper(own: Wrapped, built: Wrapped) -> bool:
    """Return whether ``own`` has received all that ``built`` has."""
    same = own.inner.keys() == built.inner.keys() and all(built.inner[name] is one for name, one in own.inner.items())
    try:
        return bool(same and own.size == built.size and own.stride == built.stride and own.context == built.context)
    except (RuntimeError, ValueError):  # a context with tensors or arrays
        return False


def is_absent(target: Any) -> bool:
    """Return whether ``into`` has no counterpart. None is absent too: optimizers have it before their first step."""
    return target is ABSENT or target is None


def shard_here(sharding: Sharding, target: Any, path: str) -> torch.Tensor:
    """Return the shard of ``target``. Raises ``StateMismatch`` if it is not a DTensor that is sharded alike."""
    if not is_dtensor(target):
        raise StateMismatch(
            f"{path} is one shard of a DTensor at the source, but {type(target).__name__} here: pass `into` with a "
            f"DTensor sharded as {sharding}"
        )
    if sharding_of(target) != sharding:
        raise StateMismatch(f"{path} is sharded as {sharding_of(target)} here but as {sharding} at the source")
    return target.to_local()
