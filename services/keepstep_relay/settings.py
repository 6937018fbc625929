"""What a relay can be told, and where it is read from: flags beat the environment beats a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep_mesh.config.settings import byte_size, duration, whole
from keepstep_mesh.serving.listen_settings import RegisteredSettings, read_registered_settings, settings_of_service
from keepstep_relay.core.events import Limits


@dataclass(frozen=True, kw_only=True)
class RelaySettings(RegisteredSettings):
    """``memory``: bytes of the memory tier. ``data_dir``: of the disk tier, ``durable``: URL of the durable one, None:
    there is none. In seconds, ``max_wait``: longest that a reader waits for what is still to come; ``body_timeout``:
    longest that a chunk or manifest may take on its way in or out.
    """

    service = "relay"

    bind: str = "127.0.0.1:29520"
    memory: int = 4 << 30
    data_dir: Path | None = None
    durable: str | None = None
    limits: Limits = field(default_factory=Limits)
    max_wait: float = 60.0
    body_timeout: float = 60.0


LIMITS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "keep_live": ("keep_live", whole),
    "keep_durable": ("keep_durable", whole),
    "live_age": ("live_seconds", duration),
    "durable_age": ("durable_seconds", duration),
    "live_ttl": ("live_ttl_seconds", duration),
    "upload_timeout": ("upload_seconds", duration),
    "max_checkpoints": ("checkpoints", whole),
    "max_chunks": ("chunks", whole),
}
"""Flag: field of ``Limits``, how its text is read."""
NOT_ZERO = ("upload_timeout", "body_timeout", "max_checkpoints", "max_chunks")
MIN_MEMORY = 64 << 20


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Mapping[str, Any] | None = None
) -> RelaySettings:
    """``flags``: those of ``read_listen_settings``, fields of ``RelaySettings``, ``lighthouse``, keys of ``LIMITS``.

    In the environment they are ``KEEPSTEP_RELAY_<NAME>``, but ``KEEPSTEP_LIGHTHOUSE``; in the file ``relay_<name>``.
    Raises ``ValueError`` that names the source of what is wrong, ``AuthError`` for tokens.
    """
    settings = settings_of_service(RelaySettings.service, flags, environ, file)
    default = RelaySettings()

    told = {
        name: settings.get(f"relay_{name}", read, getattr(default.limits, into))
        for name, (into, read) in LIMITS.items()
    }
    body_timeout = settings.get("relay_body_timeout", duration, default.body_timeout)
    for name, value in (*told.items(), ("body_timeout", body_timeout)):
        if value < 0:
            raise ValueError(f"{name} must be 0 or more, not {value:g}")
        if value == 0 and name in NOT_ZERO:
            raise ValueError(f"{name} must be more than 0")
    memory = settings.get("relay_memory", byte_size, default.memory)
    if memory < MIN_MEMORY:
        raise ValueError(f"the memory tier needs at least {MIN_MEMORY >> 20} MiB, not {memory} bytes")
    return RelaySettings(
        **read_registered_settings(settings, RelaySettings.service, default.bind),
        memory=memory,
        data_dir=settings.path("relay_data_dir"),
        durable=settings.get("relay_durable", str, None),
        limits=Limits(**{into: told[name] for name, (into, _) in LIMITS.items()}),
        max_wait=settings.get("relay_max_wait", duration, default.max_wait),
        body_timeout=body_timeout,
    )
