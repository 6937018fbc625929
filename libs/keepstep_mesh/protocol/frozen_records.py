"""Make records, which are frozen dataclasses with slots, in a fifth of the time. Pure.

``__init__`` of a frozen dataclass sets each field by a call. In a message of 20 fields these calls take longer than
everything else that a message costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def maker(cls: Callable[P, T]) -> Callable[P, T]:
    """Return a function that makes a ``cls`` from the arguments that ``cls`` takes.

    It fills a ``Draft``, an object with the same slots that is not frozen, which then becomes a ``cls``.

    Args:
        cls: a dataclass with slots, without ``__post_init__`` and default factories.

    Raises:
        TypeError: ``cls`` is something else.
    """
    draft = _draft(cls)
    known: dict[str, Any] = {"Draft": draft, "cls": cls}
    arguments = []
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        has_default = field.default is not dataclasses.MISSING
        known[f"default_{field.name}"] = field.default
        arguments.append(f"{field.name}=default_{field.name}" if has_default else field.name)
    make: Callable[P, T] = _function(arguments, [(field.name, field.name) for field in fields], known)
    return make


def copier(cls: Callable[P, T], source: type, *changed: str) -> Callable[..., T]:
    """Return a function that makes a ``cls`` from a record of ``source`` and from the values of some fields, by name.

    Fields of equal names are copied, so that a new field needs to be declared only in both classes. Fields that
    ``source`` does not have keep their defaults.

    Args:
        cls: as for ``maker``.
        source: a dataclass.
        changed: names of the fields whose values are arguments, after the record.

    Raises:
        TypeError: a field has no value.
    """
    known: dict[str, Any] = {"Draft": _draft(cls), "cls": cls}
    copied = {field.name for field in dataclasses.fields(source)}
    values = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in changed:
            values.append((field.name, field.name))
        elif field.name in copied:
            values.append((field.name, f"record_.{field.name}"))
        elif field.default is not dataclasses.MISSING:
            known[f"default_{field.name}"] = field.default
            values.append((field.name, f"default_{field.name}"))
        else:
            raise TypeError(f"{source.__name__} has no field {field.name!r} of {cls!r}; pass its value as an argument")
    copy: Callable[..., T] = _function(["record_", *changed], values, known)
    return copy


def _draft(cls: Callable[..., Any]) -> type:
    """Return a class that is not frozen, whose instances can become a ``cls``."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    factories = any(field.default_factory is not dataclasses.MISSING for field in fields)
    if not dataclasses.is_dataclass(cls) or hasattr(cls, "__post_init__") or factories:
        raise TypeError(f"no maker for {cls!r}; pass a dataclass without __post_init__ and without default factories")
    draft = type("Draft", (), {"__slots__": [field.name for field in fields]})
    draft().__class__ = cls  # TypeError: it has other slots
    return draft


def _function(arguments: list[str], values: list[tuple[str, str]], known: dict[str, Any]) -> Any:
    """Return a function that fills a draft with ``values``: names of fields, and expressions."""
    lines = [f"def make({', '.join(arguments)}):", " made = Draft()"]
    lines += [f" made.{name} = {value}" for name, value in values]
    lines += [" made.__class__ = cls", " return made"]
    exec("\n".join(lines), known)  # noqa: S102 - built from classes of ours when a module is imported
    return known["make"]
