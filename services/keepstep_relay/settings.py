"""Settings of a relay. A flag overrides the environment, which overrides the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepstep_mesh.config.settings import byte_size, duration, whole
from keepstep_mesh.serving.listen_settings import RegisteredSettings, read_registered_settings, settings_of_service
from keepstep_relay.core.events import Limits
from keepstep_relay.core.retention import LEAST_DURABLE_TTL_SECONDS


@dataclass(frozen=True, kw_only=True)
class RelaySettings(RegisteredSettings):
    """Settings of one relay.

    Attributes:
        memory: Bytes of the memory tier.
        data_dir: Folder of the disk tier; None: no disk tier.
        durable: URL of the durable tier; None: no durable tier.
        memory_checkpoints: Durable checkpoints to keep per job if the relay only has memory; 0: refuse them.
        max_wait: Longest wait of a reader for a missing chunk or manifest, in seconds.
        body_timeout: Longest transfer of one chunk or manifest, in seconds.
        processes: Processes that serve its port.
    """

    service = "relay"

    bind: str = "127.0.0.1:29520"
    memory: int = 4 << 30
    data_dir: Path | None = None
    durable: str | None = None
    memory_checkpoints: int = 0
    limits: Limits = field(default_factory=Limits)
    max_wait: float = 60.0
    body_timeout: float = 60.0
    processes: int = 1


LIMITS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "keep_live": ("keep_live", whole),
    "keep_durable": ("keep_durable", whole),
    "durable_age": ("durable_seconds", duration),
    "durable_ttl": ("durable_ttl_seconds", duration),
    "upload_timeout": ("upload_seconds", duration),
    "max_checkpoints": ("checkpoints", whole),
    "max_chunks": ("chunks", whole),
}
"""Flag -> field of ``Limits``, parser of its text."""
NOT_ZERO = ("upload_timeout", "max_checkpoints", "max_chunks")
MIN_MEMORY = 64 << 20
MAX_PROCESSES = 64


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> RelaySettings:
    """Return the settings of a relay.

    Args:
        flags: The flags of ``read_listen_settings``, fields of ``RelaySettings``, ``lighthouse``, keys of ``LIMITS``.
        environ: Variables ``KEEPSTEP_RELAY_<NAME>`` and ``KEEPSTEP_LIGHTHOUSE``.

    Raises:
        ValueError: A value is invalid; the message names its source.
        AuthError: The tokens are invalid.
    """
    settings = settings_of_service(RelaySettings.service, flags, environ)
    default = RelaySettings()

    given = {
        name: settings.get(f"relay_{name}", read, getattr(default.limits, into))
        for name, (into, read) in LIMITS.items()
    }
    for name, value in given.items():
        if value < 0:
            raise ValueError(f"invalid {name} {value:g}: expected 0 or more")
        if value == 0 and name in NOT_ZERO:
            raise ValueError(f"invalid {name} 0: expected more than 0")
    if 0 < given["durable_ttl"] < LEAST_DURABLE_TTL_SECONDS:
        raise ValueError(
            f"invalid durable_ttl {given['durable_ttl']:g} seconds: expected 0 (never) or at least a day, such as 30d"
        )
    memory = settings.get("relay_memory", byte_size, default.memory)
    if memory < MIN_MEMORY:
        raise ValueError(f"invalid memory {memory} bytes: expected at least {MIN_MEMORY >> 20} MiB")
    memory_checkpoints = settings.get("relay_memory_checkpoints", whole, default.memory_checkpoints)
    if memory_checkpoints < 0:
        raise ValueError(f"invalid memory_checkpoints {memory_checkpoints}: expected 0 or more")
    processes = settings.get("relay_processes", whole, default.processes)
    if not 1 <= processes <= MAX_PROCESSES:
        raise ValueError(f"invalid processes {processes}: expected 1 to {MAX_PROCESSES}")
    data_dir, durable = settings.path("relay_data_dir"), settings.get("relay_durable", str, None)
    limits = Limits(**{into: given[name] for name, (into, _) in LIMITS.items()})
    if memory_checkpoints and data_dir is None and durable is None:
        limits = replace(limits, keep_durable=limits.keep_durable or memory_checkpoints)
    return RelaySettings(
        **read_registered_settings(settings, RelaySettings.service, default.bind),
        memory=memory,
        data_dir=data_dir,
        durable=durable,
        memory_checkpoints=memory_checkpoints,
        limits=limits,
        processes=processes,
    )
