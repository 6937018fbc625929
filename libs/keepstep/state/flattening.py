"""State dicts as flat maps from keys to leaves, with the keys of torch.distributed.checkpoint: ``model.layer.weight``.

Dicts are flattened. Lists are flattened if they contain a tensor or a dict, at any depth. All other values are leaves.
Unlike in torch, an empty dict is a leaf too, so that it is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from keepstep.state.errors import CollidingKeys, UnsupportedValue
from keepstep_mesh.protocol.state_content import MAX_DEPTH
from keepstep_mesh.protocol.stored_keys import Index, Path, key_of


@runtime_checkable
class Stateful(Protocol):
    """``torch.distributed.checkpoint.stateful.Stateful``, whose import takes as long as that of torch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""


@dataclass(frozen=True)
class Leaf:
    path: Path
    value: Any


def flatten(state_dict: Mapping[Any, Any]) -> dict[str, Leaf]:
    """Return the leaves of ``state_dict`` by key.

    Raises:
        CollidingKeys: two leaves have the same key, such as ``{"a.b": 1, "a": {"b": 2}}``.
        UnsupportedValue: the state is nested too deep, or contains itself.
    """
    found: dict[str, Leaf] = {}
    for leaf in _leaves(state_dict, ()):
        key = key_of(leaf.path)
        if key in found:
            raise CollidingKeys(f"two values of the state have the key {key!r}: rename one of them")
        found[key] = leaf
    return found


def _leaves(value: Any, path: Path) -> Iterator[Leaf]:
    check_depth(path)
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and _has_parts(value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, Index(number)))
    else:
        yield Leaf(path, value)


def _has_parts(value: list[Any], seen: frozenset[int] = frozenset()) -> bool:
    """Return whether a list is flattened. ``seen``: the lists around it, which it may contain again."""
    return any(
        isinstance(item, (torch.Tensor, Mapping))
        or (
            isinstance(item, list)
            and id(item) not in seen
            and len(seen) < MAX_DEPTH
            and _has_parts(item, seen | {id(item)})
        )
        for item in value
    )


def check_depth(path: Path) -> None:
    """Raise ``UnsupportedValue`` if a value of a state lies too deep in it, as each does of one that contains itself.

    Args:
        path: of the value.
    """
    if len(path) > MAX_DEPTH + 1:
        raise UnsupportedValue(
            f"{key_of(path[:3])}... is nested more than {MAX_DEPTH} deep, or contains itself: store a state that is "
            f"flatter"
        )


def place(root: Any, path: Path, value: Any) -> None:
    """Set the leaf at ``path`` of a state that has it."""
    for step in path[:-1]:
        root = root[step.number if isinstance(step, Index) else step]
    last = path[-1]
    root[last.number if isinstance(last, Index) else last] = value


def build(leaves: Mapping[str, Leaf]) -> dict[Any, Any]:
    """Return the nested state of ``leaves``. Inverse of ``flatten``, except that every mapping is a dict."""
    root: dict[Any, Any] = {}
    for leaf in leaves.values():
        container: Any = root
        for step, following in zip(leaf.path, leaf.path[1:], strict=False):
            container = _child(container, step, [] if isinstance(following, Index) else {})
        _child(container, leaf.path[-1], leaf.value)
    return root


def _child(container: Any, step: Any, default: Any) -> Any:
    if not isinstance(step, Index):
        return container.setdefault(step, default)
    while len(container) <= step.number:
        container.append(None)
    if container[step.number] is None:
        container[step.number] = default
    return container[step.number]


def pack_path(path: Path) -> tuple[Any, ...]:
    """Return ``path`` as values that a manifest can store: int for a list, a tuple for a key that is no string."""
    return tuple(step.number if isinstance(step, Index) else step if type(step) is str else (step,) for step in path)


@dataclass(frozen=True)
class Expanded:
    """A state dict whose ``Stateful`` objects are replaced by their state dicts."""

    state: dict[Any, Any]
    stateful: tuple[tuple[Path, Stateful, dict[str, Any]], ...]
    """The objects with their paths, and their state dicts in ``state``."""


def expand(state_dict: Mapping[Any, Any]) -> Expanded:
    """Call ``state_dict`` of every ``Stateful`` object (modules and optimizers are such), at any depth of dicts.

    They are called in the order of their keys, so that their collectives meet if ranks have them in another order.
    """
    found: list[tuple[Path, Stateful, dict[str, Any]]] = []

    def visit(value: Any, path: Path) -> Any:
        check_depth(path)
        if isinstance(value, Mapping):
            visited = {key: visit(value[key], (*path, key)) for key in sorted(value, key=str)}
            return {key: visited[key] for key in value}
        if isinstance(value, Stateful) and not isinstance(value, (torch.Tensor, type)):
            state = value.state_dict()
            found.append((path, value, state))
            return state
        return value

    return Expanded(visit(state_dict, ()), tuple(found))


def list_lengths(paths: Iterable[Path]) -> dict[str, int]:
    """Return the length of each list that ``paths`` go through, by the key of the list."""
    found: dict[str, int] = {}
    for path in paths:
        for at, step in enumerate(path):
            if isinstance(step, Index):
                key = key_of(path[:at])
                found[key] = max(found.get(key, 0), step.number + 1)
    return found
