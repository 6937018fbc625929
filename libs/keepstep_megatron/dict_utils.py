"""Operations on nested dicts and lists. Every other value, also a tuple, is a leaf.

The names are those of Megatron Core's ``dist_checkpointing.dict_utils``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

Nested: TypeAlias = dict[Any, Any] | list[Any]
Path: TypeAlias = tuple[Any, ...]
_SHOWN_CHARACTERS = 30


def _items(x: Nested) -> Iterable[tuple[Any, Any]]:
    return x.items() if isinstance(x, dict) else enumerate(x)


def extract_matching_values(
    x: Nested, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """Split a structure into the leaves that match and the others; both keep the structure.

    Dicts and lists without a leaf are left out, with two exceptions: an empty dict or list in a dict is among the
    others, and for one in a list ``predicate`` decides.

    Args:
        x: nested dicts and lists; not changed.
        predicate: whether a leaf matches.
        return_lists_as_dicts: make each list a dict from positions to values, so that positions stay known.

    Returns:
        The matching leaves, and the others.

    Raises:
        ValueError: ``x`` is neither a dict nor a list.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"cannot extract values of a {type(x).__name__}: expected a dict or a list")  # noqa: TRY004
    matching: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for place, value in _items(x):
        if isinstance(value, dict | list) and value:
            parts = extract_matching_values(value, predicate, return_lists_as_dicts)
            for part, target in zip(parts, (matching, others), strict=True):
                if part:
                    target[place] = part
        elif isinstance(x, dict) and isinstance(value, dict | list):
            others[place] = {} if isinstance(value, dict) or return_lists_as_dicts else []
        else:
            (matching if predicate(value) else others)[place] = value
    if isinstance(x, list) and not return_lists_as_dicts:
        return list(matching.values()), list(others.values())
    return matching, others


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """Compare two structures.

    Lists, tuples and numpy arrays are compared by position, tensors by all their elements, sharded leaves by their
    data.

    Args:
        x1: the left structure.
        x2: the right structure.
        prefix: path of both, which begins every path of the result.

    Returns:
        Paths that only the left has; paths that only the right has; and ``(path, type on the left, type on the
        right)`` of values that differ.
    """
    left, right, mismatch = list[Path](), list[Path](), list[tuple[Path, type, type]]()
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(x1, dict) and isinstance(x2, dict):
        left += [(*prefix, key) for key in x1 if key not in x2]
        right += [(*prefix, key) for key in x2 if key not in x1]
        pairs += [(key, value, x2[key]) for key, value in x1.items() if key in x2]
    elif _is_sequence(x1) and type(x1) is type(x2):
        left += [(*prefix, position) for position in range(len(x2), len(x1))]
        right += [(*prefix, position) for position in range(len(x1), len(x2))]
        pairs += [(position, *both) for position, both in enumerate(zip(x1, x2, strict=False))]
    elif hasattr(x1, "replica_id") and hasattr(x2, "replica_id") and type(x1) is type(x2):
        pairs.append((type(x1), x1.data, x2.data))
    elif _differ(x1, x2):
        mismatch.append((prefix, type(x1), type(x2)))
    for key, value, other in pairs:
        only_left, only_right, differing = diff(value, other, (*prefix, key))
        left += only_left
        right += only_right
        mismatch += differing
    return left, right, mismatch


def _is_sequence(x: Any) -> bool:
    return isinstance(x, list | tuple) or (isinstance(x, np.ndarray) and x.ndim > 0)


def _differ(x1: Any, x2: Any) -> bool:
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        return x1.shape != x2.shape or not bool((x1.detach().cpu() == x2.detach().cpu()).all())
    try:
        return bool(x1 != x2)
    except (RuntimeError, ValueError):  # tensors and arrays have no single answer
        return True


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Print the types and the beginnings of all values.

    Args:
        x: nested dicts and lists.
        prefix: path of ``x``; its length is the depth of the output.
        indent: spaces for each level.
    """
    sys.stdout.write("".join(_described(x, len(prefix), indent)))


def _described(x: Any, depth: int, indent: int) -> Iterator[str]:
    if isinstance(x, dict | list):
        yield "\n"
        for place, value in _items(x):
            yield f"{' ' * indent * depth}{'>' if isinstance(x, dict) else '-'} {place}: "
            yield from _described(value, depth + 1, indent)
    elif isinstance(x, torch.Tensor):
        yield f"Tensor of shape {x.shape}\n"
    else:
        text = str(x)
        more = "... (truncated)" if len(text) > _SHOWN_CHARACTERS else ""
        yield f"[{type(x)}]: {text[:_SHOWN_CHARACTERS]}{more}\n"


def nested_values(x: Nested) -> Iterator[Any]:
    """Yield every leaf.

    Args:
        x: nested dicts and lists.
    """
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_iter(x: Nested) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ``(container, key or position, value)`` of every leaf; ``container[key] = ...`` replaces it.

    Args:
        x: nested dicts and lists.
    """
    for place, value in _items(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, place, value


def dict_map(f: Callable[[Any], Any], d: Nested) -> None:
    """Replace every leaf by ``f(leaf)``, in place.

    Args:
        f: the function.
        d: nested dicts and lists; changed.
    """
    dict_map_with_key(lambda _, value: f(value), d)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: Nested) -> None:
    """Replace every leaf by ``f(key or position, leaf)``, in place.

    Args:
        f: the function.
        d: nested dicts and lists; changed.
    """
    for container, place, value in nested_items_iter(d):
        container[place] = f(place, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf by ``f(leaf)``, in place.

    Args:
        f: the function.
        x: nested dicts and lists, or a leaf; dicts and lists are changed.

    Returns:
        ``x``, or ``f(x)`` if it is a leaf.
    """
    if not isinstance(x, dict | list):
        return f(x)
    for place, value in _items(x):
        x[place] = dict_list_map_inplace(f, value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a new structure with ``f(leaf)`` in place of every leaf.

    Args:
        f: the function.
        x: nested dicts and lists, or a leaf; not changed.
    """
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Add the leaves of ``x2`` to ``x1``, in place.

    Args:
        x1: nested dicts and lists; changed.
        x2: nested dicts and lists. No leaf is at a place where ``x1`` has a value; lists at the same place have equal
            lengths.
        key: path of both, for errors.

    Returns:
        ``x1``.

    Raises:
        ValueError: both have a value at the same place, or lists have different lengths.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"cannot merge lists of {len(x1)} and {len(x2)} values at {key}: expected equal lengths")
        for position, value in enumerate(x2):
            x1[position] = merge(x1[position], value, (*key, position))
    else:
        raise ValueError(  # noqa: TRY004
            f"cannot merge a {type(x2).__name__} into a {type(x1).__name__} at {key}: both have a value there"
        )
    return x1


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Hashable] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Group values by key, and reduce each group.

    Args:
        xs: the values.
        key_fn: key of a value.
        value_fn: the part of a value that is grouped.
        reduce_fn: the result of a group.

    Returns:
        The result of each key, in the order in which the keys were found.
    """
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(group) for key, group in groups.items()}
