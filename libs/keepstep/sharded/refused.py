"""Names of Megatron Core that keepstep does not have: importing one works, and its use says what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn


class _Refused(type):
    """The type of what takes the place of a class or a function."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> _Refused:
        """Make one. Raises ``NotImplementedError`` for a class that inherits from one."""
        for base in bases:
            raise NotImplementedError(base.__doc__)
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(cls.__doc__)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{cls.__doc__} (attribute {name!r})")


def refusing(module: str, instead: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module without some names of Megatron Core.

    Args:
        module: its name.
        instead: for each name, what to use instead.

    Returns:
        A function from a name to an object that raises ``NotImplementedError`` when it is called or inherited from.
    """

    @cache
    def found(name: str) -> Any:
        if name not in instead:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"keepstep, which stands in for Megatron Core, has no {module}.{name}: {instead[name]}"
        return _Refused(name, (), {"__doc__": text, "__module__": module})

    return found
