"""Read the environment variables of a Manager.

A time limit or number that is set in the environment overrides its argument (``seconds``, ``integer``). The identity
and the addresses of a process are read from the environment only without an argument (``variable``, ``from_launcher``).

Every variable is read under ``KEEPSTEP_`` first, then under ``TORCHFT_``, so that launchers for torchft work.
"""

from __future__ import annotations

import os
from datetime import timedelta

from keepstep_mesh.config.settings import from_environment


def variable(name: str) -> str | None:
    """Return ``KEEPSTEP_<name>``, else ``TORCHFT_<name>``; None if neither is set or both are empty."""
    found = from_environment(name)
    return found[1] if found is not None else None


def seconds(name: str, argument: timedelta) -> timedelta:
    """Return a duration from the environment, in seconds there, else ``argument``.

    Raises:
        ValueError: the value is not a positive number.
    """
    found = from_environment(name)
    if found is None:
        if argument <= timedelta(0):
            raise ValueError(
                f"{name.removesuffix('_SEC').lower()}={argument} must be positive, such as timedelta(seconds=60)"
            )
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
    """Return a number per second from the environment; None if it is not set. ValueError if it is not positive."""
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
    """Return an integer from the environment, else ``argument``. ValueError if it is negative or not a number."""
    found = from_environment(name)
    number = argument if found is None else _whole(*found)
    if number < 0:
        raise ValueError(f"{name.lower()}={number} must be at least 0")
    return number


def flag(name: str, argument: bool | None) -> bool | None:
    """Return a truth value from the environment, else ``argument``. ValueError if it is none of 0, 1, false, true."""
    found = from_environment(name)
    if found is None:
        return argument
    source, value = found
    known = {"0": False, "false": False, "1": True, "true": True}
    if value.lower() not in known:
        raise ValueError(f"{source}={value!r} must be one of {', '.join(known)}")
    return known[value.lower()]


def from_launcher(name: str, argument: int | None, default: int) -> int:
    """Return the argument, else torchrun's variable ``name`` (RANK, WORLD_SIZE, MASTER_PORT), else ``default``."""
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
    """Return the number of times that the launcher has restarted this group, equal in all its ranks.

    It is TORCHELASTIC_RESTART_COUNT. 0: unknown, because each torchrun of a group on several machines
    (GROUP_WORLD_SIZE) counts from its own start.
    """
    value, launchers = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("GROUP_WORLD_SIZE", "1")
    return int(value) if value.isdigit() and launchers == "1" else 0
