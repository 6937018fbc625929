"""What the metrics service can be told, and where it is read from: flags beat the environment beats a file."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep_mesh.auth import ClientToken
from keepstep_mesh.listen_settings import ListenSettings, read_listen_settings
from keepstep_mesh.settings import Settings, duration, split_addresses

DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(ListenSettings):
    """``data_dir``: of the SQLite file; None: nothing survives a restart. In seconds, ``keep_events``: how long events
    are kept; ``snapshot_every``: between snapshots of the history, which take the place of the journal.

    ``lighthouses``: where it registers, as ``name``, with the token ``token``.
    """

    bind: str = "127.0.0.1:29530"
    data_dir: Path | None = None
    keep_events: float = 30 * DAY
    snapshot_every: float = 300.0
    lighthouses: tuple[str, ...] = ()
    name: str | None = None
    token: ClientToken | None = None

    def shown_token(self) -> str | None:
        """What it shows to lighthouses: the token that it was given, else one of those that it takes."""
        return self.token.latest() if self.token else self.own_token()

    def service_name(self, port: int) -> str:
        """``name``, else one that is the same after a restart."""
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "metrics"
        return self.name or f"{host}-{port}"


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Mapping[str, Any] | None = None
) -> MetricsSettings:
    """``flags``: those of ``read_listen_settings``, fields of ``MetricsSettings``, ``lighthouse``.

    In the environment they are ``KEEPSTEP_METRICS_<NAME>``, but ``KEEPSTEP_LIGHTHOUSE``; in the file
    ``metrics_<name>``. Raises ``ValueError`` that names the source of what is wrong, ``AuthError`` for tokens.
    """
    given = {"lighthouse" if name == "lighthouse" else f"metrics_{name}": value for name, value in flags.items()}
    settings = Settings(flags=given, environ=environ, file=file or {})
    default = MetricsSettings()
    times = {
        name: settings.get(f"metrics_{name}", duration, getattr(default, name))
        for name in ("keep_events", "snapshot_every")
    }
    for name, seconds in times.items():
        if seconds <= 0:
            raise ValueError(f"{name} must be more than 0")
    lighthouses = settings.get("lighthouse", str, "")
    return MetricsSettings(
        **read_listen_settings(settings, "metrics", default.bind),
        **times,
        data_dir=settings.path("metrics_data_dir"),
        lighthouses=split_addresses(lighthouses) if lighthouses else (),
        name=settings.get("metrics_name", str, None),
        token=ClientToken(environ),
    )
