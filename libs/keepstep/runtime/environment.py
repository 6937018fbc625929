"""What the Manager takes from its environment.

A variable that is set overrides the argument, everywhere the value is used (``seconds``, ``integer``), but for what
says who and where: that is looked for here when no argument says it (``variable``, ``from_launcher``).

Every variable is read under ``KEEPSTEP_`` first, then under ``TORCHFT_``, so that launchers written for torchft serve.
"""

from __future__ import annotations

import os
from datetime import timedelta

from keepstep_mesh.config.settings import from_environment


def variable(name: str) -> str | None:
    """The value of ``KEEPSTEP_<name>``, else ``TORCHFT_<name>``; None when neither is set or both are empty."""
    found = from_environment(name)
    return found[1] if found is not None else None


def seconds(name: str, argument: timedelta) -> timedelta:
    """A duration in seconds from the environment, else ``argument``. ValueError that names the one that is none."""
    found = from_environment(name)
    if found is None:
        if argument <= timedelta(0):
            raise ValueError(f"{name.removesuffix('_SEC').lower()}={argument} must be positive")
        return argument
    source, value = found
    try:
        given = timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        given = timedelta(0)
    if given <= timedelta(0):
        raise ValueError(f"{source}={value!r} must be a positive number of seconds, such as 60")
    return given


def rate(name: str) -> float | None:
    """A number of something a second from the environment; None when it is not set."""
    value = variable(name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ValueError(f"KEEPSTEP_{name}={value!r} must be a positive number, such as 1e9; unset it for no limit")
    return number


def integer(name: str, argument: int) -> int:
    """A whole number from the environment, else ``argument``; at least 0. ValueError that names it."""
    found = from_environment(name)
    number = argument if found is None else _whole(*found)
    if number < 0:
        raise ValueError(f"{name.lower()}={number} must be at least 0")
    return number


def from_launcher(name: str, argument: int | None, default: int) -> int:
    """RANK, WORLD_SIZE or MASTER_PORT: the argument, else torchrun's variable, else ``default``."""
    if argument is not None:
        return argument
    value = os.environ.get(name)
    return _whole(name, value, "; torchrun and `keepstep run` set it") if value else default


def _whole(name: str, value: str, advice: str = "") -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} must be a whole number{advice}") from None


def restart_count() -> int:
    """How often the launcher has restarted this group (torchrun's TORCHELASTIC_RESTART_COUNT)."""
    value = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(value) if value.isdigit() else 0
