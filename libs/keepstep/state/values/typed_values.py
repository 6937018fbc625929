"""Values that are more than a plain dict, list, number or string: their class is stored by its name.

Their content travels as that of the plain type, and the class is looked up where it is loaded (``known_classes``). No
method of a user's class is called, except that an enum looks up its member.
"""

from __future__ import annotations

import io
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from keepstep.state.errors import StateMismatch, UnsupportedValue
from keepstep.state.values.known_classes import class_name, find_class
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import glimpse

_BASES = (OrderedDict, dict, list, tuple, set, frozenset, int, float, str, bytes)
"""Types whose subclasses are stored, the more special one first."""
_FACTORIES: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
} | {one.__name__: one for one in (OrderedDict, Counter, deque)}
"""Possible factories of a defaultdict."""
_PATHS = {one.__name__: one for one in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath)}
Build = Callable[[Any, Any, str], Any]
"""Returns the value of a node, with its counterpart in the receiver's state and its path."""


def typed_parts(value: Any, path: str) -> tuple[list[Any], list[Any]] | None:
    """Take a value apart.

    Returns:
        The beginning of its node, and the values whose nodes follow. None: it is not of these types.

    Raises:
        UnsupportedValue: it has a part that cannot be stored; the error names ``path``.
    """
    kind = type(value)
    if kind is deque:
        return ["deque", value.maxlen], list(value)
    if kind is defaultdict:
        return ["defaultdict", _factory_name(value.default_factory, path)], [dict(value)]
    if kind is bytearray:
        return ["bytearray"], [bytes(value)]
    if kind is io.BytesIO:
        return ["bytesio", value.tell()], [value.getvalue()]
    if kind.__name__ in _PATHS and kind is _PATHS[kind.__name__]:
        return ["path", kind.__name__], [str(value)]
    if isinstance(value, Enum):
        return ["enum", class_name(kind)], [value.value]
    if isinstance(value, np.generic) or kind in (bool, torch.Size):
        return None
    base = next((one for one in _BASES if isinstance(value, one)), None)
    if base is None and is_dataclass(kind):
        names = [one.name for one in fields(kind)]
        attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return ["dataclass", class_name(kind)], [attributes | getattr(value, "__dict__", {})]
    if base is None or kind is base:
        return None
    if base is tuple and hasattr(kind, "n_sequence_fields"):  # its constructor alone makes it
        raise UnsupportedValue(f"{path} is a {class_name(kind)}, which a checkpoint cannot store: store a plain tuple")
    if isinstance(value, defaultdict) or any(
        getattr(one, "__slots__", ()) for one in kind.__mro__ if one not in base.__mro__
    ):
        raise UnsupportedValue(
            f"{path} is a {class_name(kind)}, which has more than the values of a {base.__name__} and attributes: "
            f"store a plain {base.__name__}"
        )
    return ["instance", class_name(kind)], [_plain(value, base), getattr(value, "__dict__", None) or None]


def _plain(value: Any, base: type) -> Any:
    """Return a value of ``base`` with the content of ``value``, without calling methods that its class may replace."""
    if issubclass(base, dict):
        return base((key, base.__getitem__(value, key)) for key in base.__iter__(value))
    scalars: dict[type, Callable[[Any], Any]] = {
        int: int.__int__,
        float: float.__float__,
        str: str.__str__,
        bytes: lambda one: bytes(memoryview(one)),
    }
    iterable: Any = base
    return scalars[base](value) if base in scalars else iterable(iterable.__iter__(value))


def _factory_name(factory: Any, path: str) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise UnsupportedValue(
            f"{path} is a defaultdict whose default_factory is {factory!r}: use one of {', '.join(_FACTORIES)}, or "
            f"store dict(...)"
        )
    return str(name)


def build_typed(node: list[Any], into: Any, path: str, build: Build) -> Any:
    """Return the value of a node that begins with what ``typed_parts`` returned.

    Raises:
        ManifestError: the node is invalid.
        StateMismatch: its class is not known here, or refuses the value.
    """
    try:
        return _BUILDERS[node[0]](node, into, path, build)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise StateMismatch(
            f"{path} cannot be loaded as {glimpse(node[:2])}: {type(error).__name__}: {error}"
        ) from error


def _deque(node: list[Any], into: Any, path: str, build: Build) -> deque[Any]:
    known = list(into) if isinstance(into, deque) else []
    items = [
        build(item, known[index] if index < len(known) else None, f"{path}[{index}]")
        for index, item in enumerate(node[2:])
    ]
    return deque(items, node[1])


def _defaultdict(node: list[Any], into: Any, path: str, build: Build) -> defaultdict[Any, Any]:
    _, factory, content = node
    return defaultdict(None if factory is None else _FACTORIES[factory], build(content, into, path))


def _bytearray(node: list[Any], into: Any, path: str, build: Build) -> bytearray:
    del into
    _, content = node
    return bytearray(_bytes(content, path, build))


def _bytesio(node: list[Any], into: Any, path: str, build: Build) -> io.BytesIO:
    del into
    _, position, content = node
    built = io.BytesIO(_bytes(content, path, build))
    built.seek(position)
    return built


def _bytes(node: Any, path: str, build: Build) -> bytes:
    data = build(node, None, path)
    if type(data) not in (bytes, type(None)):  # None: only targets of tensors are looked for
        raise ManifestError(f"{path} has bytes in it that are a {type(data).__name__}")
    return data or b""


def _path(node: list[Any], into: Any, path: str, build: Build) -> pathlib.PurePath:
    del into, path, build
    _, kind, text = node
    return _PATHS[kind](text)


def _enum(node: list[Any], into: Any, path: str, build: Build) -> Any:
    _, name, content = node
    return find_class(name, Enum, into, path)(build(content, None, path))


def _dataclass(node: list[Any], into: Any, path: str, build: Build) -> Any:
    _, name, content = node
    kind: Any = find_class(name, object, into, path)
    values = build(content, vars(into) if type(into) is kind and hasattr(into, "__dict__") else None, path)
    if type(values) is not dict or not is_dataclass(kind):
        raise ManifestError(f"{path} is an invalid dataclass: {glimpse(name)} of a {type(values).__name__}")
    if missing := [one.name for one in fields(kind) if one.name not in values]:
        raise StateMismatch(f"{path} was stored without {', '.join(missing)}, which are fields of {name} here")
    built: Any = object.__new__(kind)  # type: ignore[arg-type]  # mypy takes it for an instance
    for attribute, value in values.items():
        object.__setattr__(built, attribute, value)
    return built


def _instance(node: list[Any], into: Any, path: str, build: Build) -> Any:
    _, name, content, attributes = node
    value = build(content, into, path)
    if value is None:
        return None  # long bytes, while only targets of tensors are looked for
    base: Any = type(value)
    if base not in _BASES:
        raise ManifestError(f"{path} is a {glimpse(name)} of a {base.__name__}")
    kind = find_class(name, base, into, path)
    if issubclass(base, (dict, list, set)):
        built = base.__new__(kind)
        if issubclass(base, dict):
            for key, item in value.items():
                base.__setitem__(built, key, item)
        else:
            (list.extend if base is list else set.update)(built, value)
    else:
        names = getattr(kind, "_fields", None)
        if base is tuple and names is not None and len(names) != len(value):
            raise StateMismatch(f"{path} has {len(value)} items, but {name} has the fields {', '.join(names)} here")
        built = base.__new__(kind, value)
    if attributes is not None:
        vars(built).update(build(attributes, vars(into) if type(into) is kind else None, path))
    return built


_BUILDERS: dict[str, Callable[[list[Any], Any, str, Build], Any]] = {
    "deque": _deque,
    "defaultdict": _defaultdict,
    "bytearray": _bytearray,
    "bytesio": _bytesio,
    "path": _path,
    "enum": _enum,
    "dataclass": _dataclass,
    "instance": _instance,
}
TYPED = frozenset(_BUILDERS)
"""The names with which such nodes begin."""
