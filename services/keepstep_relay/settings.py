"""What a relay can be told, and where it is read from: flags beat the environment beats a file."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep_mesh.auth import ClientToken, Tokens, watched_tokens
from keepstep_mesh.reloading import FromFiles
from keepstep_mesh.settings import Settings, base_url, boolean, byte_size, duration, split_addresses, whole
from keepstep_mesh.tls import TlsFiles, tls_of_client, tls_of_service
from keepstep_relay.events import Limits


@dataclass(frozen=True)
class RelaySettings:
    """``bind``: host:port, port 0 for any free one. ``memory``: bytes of the memory tier. ``data_dir``: of the disk
    tier, ``durable``: URL of the durable one, None: there is none. In seconds, ``max_wait``: longest that a reader
    waits for what is still to come; ``body_timeout``: longest that a chunk or manifest may take on its way in or out.

    ``lighthouses``: where it registers, as ``name``, with the address ``advertise`` (default: where it listens) and the
    token ``token``. ``tls``: files of its certificate; without, it speaks plain HTTP; ``peer_tls``: for lighthouses.
    """

    bind: str = "127.0.0.1:29520"
    memory: int = 4 << 30
    data_dir: Path | None = None
    durable: str | None = None
    limits: Limits = field(default_factory=Limits)
    max_wait: float = 60.0
    body_timeout: float = 60.0
    lighthouses: tuple[str, ...] = ()
    name: str | None = None
    advertise: str | None = None
    tokens: Tokens | FromFiles[Tokens] = field(default_factory=Tokens)
    token: ClientToken | None = None
    tls: TlsFiles = field(default_factory=TlsFiles)
    peer_tls: TlsFiles = field(default_factory=TlsFiles)
    insecure: bool = False

    def shown_token(self) -> str | None:
        """What it shows to lighthouses: its own token, else one of those that it takes."""
        if self.token:
            return self.token.latest()
        return (self.tokens.value if isinstance(self.tokens, FromFiles) else self.tokens).for_services()

    def service_name(self, port: int) -> str:
        """``name``, else one that is the same after a restart."""
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "relay"
        return self.name or f"{host}-{port}"


LIMITS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "keep_live": ("keep_live", whole),
    "keep_durable": ("keep_durable", whole),
    "live_age": ("live_seconds", duration),
    "durable_age": ("durable_seconds", duration),
    "upload_timeout": ("upload_seconds", duration),
    "max_checkpoints": ("checkpoints", whole),
    "max_chunks": ("chunks", whole),
}
"""Flag: field of ``Limits``, how its text is read."""


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Mapping[str, Any] | None = None
) -> RelaySettings:
    """``flags``: the fields of ``RelaySettings`` and the keys of ``LIMITS``, and ``lighthouse``, ``token_file``,
    ``tls_cert``, ``tls_key``, ``tls_ca``.

    In the environment they are ``KEEPSTEP_RELAY_<NAME>``, but ``KEEPSTEP_LIGHTHOUSE``; in the file ``relay_<name>``.
    Raises ``ValueError`` that names the source of what is wrong, ``AuthError`` for tokens.
    """
    given = {"lighthouse" if name == "lighthouse" else f"relay_{name}": value for name, value in flags.items()}
    settings = Settings(flags=given, environ=environ, file=file or {})
    default = RelaySettings()

    def path(name: str) -> Path | None:
        return settings.get(f"relay_{name}", lambda text: Path(text), None)  # noqa: PLW0108 - mypy

    limits = {
        into: settings.get(f"relay_{name}", read, getattr(default.limits, into))
        for name, (into, read) in LIMITS.items()
    }
    for name, value in limits.items():
        if value < 0 or (value == 0 and name in ("upload_seconds", "checkpoints", "chunks")):
            raise ValueError(f"{name} must be more than 0, not {value:g}")
    lighthouses = settings.get("lighthouse", str, "")
    tls = tls_of_service(settings, "relay")
    advertise = settings.get("relay_advertise", str, None)
    if advertise is not None:
        advertise = base_url(advertise if "://" in advertise else f"{'https' if tls else 'http'}://{advertise}")
    memory = settings.get("relay_memory", byte_size, default.memory)
    if memory < MIN_MEMORY:
        raise ValueError(f"the memory tier needs at least {MIN_MEMORY >> 20} MiB, not {memory} bytes")
    return RelaySettings(
        bind=settings.get("relay_bind", str, default.bind),
        memory=memory,
        data_dir=path("data_dir"),
        durable=settings.get("relay_durable", str, None),
        limits=Limits(**limits),
        max_wait=settings.get("relay_max_wait", duration, default.max_wait),
        body_timeout=settings.get("relay_body_timeout", duration, default.body_timeout),
        lighthouses=split_addresses(lighthouses) if lighthouses else (),
        name=settings.get("relay_name", str, None),
        advertise=advertise,
        tokens=watched_tokens(environ, path("token_file")),
        token=ClientToken(environ),
        tls=tls,
        peer_tls=tls_of_client(environ=environ) or tls,
        insecure=settings.get("relay_insecure", boolean, default=False),
    )


MIN_MEMORY = 64 << 20
