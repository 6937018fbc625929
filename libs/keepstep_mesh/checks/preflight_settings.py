"""Which checks a machine must pass before its group joins, as users write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from keepstep_mesh.config.settings import byte_size

FORMS = "builtin, memory=SIZE, disk=FOLDER:SIZE, bandwidth=SIZE, command=COMMAND, http://... or https://..."
BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class PreflightSettings:
    """Limits of the built-in checks, and own checks."""

    least_memory: int = 256 << 20
    """Bytes of main memory that must be available."""
    least_disk: tuple[tuple[str, int], ...] = ()
    """Folders, and the bytes that must be free in each."""
    least_bandwidth: int = 0
    """Bytes per second to the lighthouse and to another group; 0: measured only."""
    commands: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()

    @classmethod
    def parsed(cls, checks: Sequence[str]) -> PreflightSettings | None:
        """Read checks, one of ``FORMS`` each. The built-in ones are always part of them. None: no checks.

        Raises:
            ValueError: a check has another form.
        """
        settings = cls()
        for check in (one.strip() for one in checks):
            settings = settings if check in ("", BUILTIN) else settings._with(check)
        return settings if any(one.strip() for one in checks) else None

    def _with(self, check: str) -> PreflightSettings:
        if check.startswith(("http://", "https://")):
            if not urlsplit(check).hostname:
                raise ValueError(f"check {check!r} has no host; write http://host:port/path")
            return replace(self, urls=(*self.urls, check))
        name, _, value = check.partition("=")
        try:
            match name:
                case "command" if value:
                    return replace(self, commands=(*self.commands, value))
                case "memory":
                    return replace(self, least_memory=byte_size(value))
                case "bandwidth":
                    return replace(self, least_bandwidth=byte_size(value))
                case "disk":
                    folder, _, size = value.rpartition(":")
                    if folder:
                        return replace(self, least_disk=(*self.least_disk, (folder, byte_size(size))))
        except ValueError as error:
            raise ValueError(f"check {check!r}: {error}") from error
        raise ValueError(f"check {check!r} is unknown; the forms are: {FORMS}")
