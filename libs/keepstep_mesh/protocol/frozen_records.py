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
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    factories = any(field.default_factory is not dataclasses.MISSING for field in fields)
    if not dataclasses.is_dataclass(cls) or hasattr(cls, "__post_init__") or factories:
        raise TypeError(f"no maker for {cls!r}; pass a dataclass without __post_init__ and without default factories")
    draft = type("Draft", (), {"__slots__": [field.name for field in fields]})
    draft().__class__ = cls  # TypeError: it has other slots
    known: dict[str, Any] = {"Draft": draft, "cls": cls}
    arguments = []
    for field in fields:
        has_default = field.default is not dataclasses.MISSING
        known[f"default_{field.name}"] = field.default
        arguments.append(f"{field.name}=default_{field.name}" if has_default else field.name)
    lines = [f"def make({', '.join(arguments)}):", " made = Draft()"]
    lines += [f" made.{field.name} = {field.name}" for field in fields]
    lines += [" made.__class__ = cls", " return made"]
    exec("\n".join(lines), known)  # noqa: S102 - built from a class of ours when a module is imported
    make: Callable[P, T] = known["make"]
    return make
