"""Where a setting comes from: a flag, else the environment, else its default; and how its text is read.

A variable ``KEEPSTEP_<NAME>`` is found under ``TORCHFT_<NAME>`` too, so that launchers written for torchft serve.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PREFIXES = ("KEEPSTEP_", "TORCHFT_")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGTkmgt])(?:i?[Bb])?|[Bb])?")
MAX_DIGITS = 30
"""Of a size."""
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)\s*(ms|s|m|h|d)?")


def from_environment(name: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """(variable, value) of the first of ``KEEPSTEP_<name>``, ``TORCHFT_<name>`` that is set and not empty."""
    for prefix in PREFIXES:
        if value := environ.get(prefix + name):
            return prefix + name, value
    return None


@dataclass(frozen=True)
class Settings:
    """``flags`` beat ``environ``. Names are snake_case; a flag that is None was not given."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def get(self, name: str, read: Callable[[str], T], default: T) -> T:
        """The setting. ``read`` turns text into it; a flag is taken as it is. ``ValueError`` names the source."""
        flag: T | None = self.flags.get(name)
        if flag is not None:
            return flag
        found = from_environment(name.upper(), self.environ)
        if found is None:
            return default
        source, text = found
        try:
            return read(text)
        except ValueError as error:
            raise ValueError(f"{source}={text!r}: {error}") from error

    def path(self, name: str) -> Path | None:
        return self.get(name, lambda text: Path(text), None)  # noqa: PLW0108 - mypy


def split_addresses(text: str) -> tuple[str, ...]:
    """``"a:1, http://b:2"`` as ``("http://a:1", "http://b:2")``. ``ValueError`` for none and for no address."""
    addresses = tuple(dict.fromkeys(base_url(one) for one in text.split(",") if one.strip()))
    if not addresses:
        raise ValueError("no address; write http://host:port, several with commas between them")
    for address in addresses:
        if not re.fullmatch(r"https?://(\[[0-9a-fA-F:.%]+\]|[^/:\[\]@\s]+):[0-9]{1,5}", address):
            raise ValueError(f"{address!r} is no address; write http://host:port")
        if not 0 < int(address.rpartition(":")[2]) <= 65535:
            raise ValueError(f"invalid port in {address!r}: expected 1-65535")
    return addresses


def base_url(address: str) -> str:
    """``http://host:port`` without a slash at its end; ``host:port`` means http."""
    address = address.strip().rstrip("/")
    return address if "://" in address else f"http://{address}"


def duration(text: str) -> float:
    """``"500ms"``, ``"1.5"``, ``"2m"`` in seconds; a bare number is seconds. ``ValueError`` for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a time; write 500ms, 1.5s, 2m or 1h (a bare number is seconds)")
    return float(match[1]) * _UNITS[match[2] or "s"]


def byte_size(text: str) -> int:
    """``"8GiB"``, ``"512M"``, ``"1000000"`` in bytes, K to T being powers of 1024. ``ValueError`` for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(match[1]) > MAX_DIGITS:
        raise ValueError("not a size; write 512MiB, 8GiB or a number of bytes")
    return int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper()))


def boolean(text: str) -> bool:
    """1/true/yes/on or 0/false/no/off. ``ValueError`` for anything else."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("write true or false")


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("not a whole number") from None


def bind_address(text: str) -> tuple[str, int]:
    """Return (host, port) of ``host:port``, ``:port`` (loopback), ``*:port`` (all of IPv4), or ``[::1]:port``."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError("not an address to listen on; write host:port, such as 0.0.0.0:29510 (port 0: any free one)")
    host = host.removeprefix("[").removesuffix("]")
    return {"": "127.0.0.1", "*": "0.0.0.0"}.get(host, host), int(port)  # noqa: S104 - only where asked for
