"""What the metrics service can be told, and where it is read from: flags beat the environment beats a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep_mesh.config.settings import duration
from keepstep_mesh.serving.listen_settings import RegisteredSettings, read_registered_settings, settings_of_service

DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(RegisteredSettings):
    """``data_dir``: of the SQLite file; None: nothing survives a restart. In seconds, ``keep_events``: how long events
    are kept; ``snapshot_every``: between snapshots of the history, which take the place of the journal.
    """

    service = "metrics"

    bind: str = "127.0.0.1:29530"
    data_dir: Path | None = None
    keep_events: float = 30 * DAY
    snapshot_every: float = 300.0


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Mapping[str, Any] | None = None
) -> MetricsSettings:
    """``flags``: those of ``read_listen_settings``, fields of ``MetricsSettings``, ``lighthouse``.

    In the environment they are ``KEEPSTEP_METRICS_<NAME>``, but ``KEEPSTEP_LIGHTHOUSE``; in the file
    ``metrics_<name>``. Raises ``ValueError`` that names the source of what is wrong, ``AuthError`` for tokens.
    """
    settings = settings_of_service(MetricsSettings.service, flags, environ, file)
    default = MetricsSettings()
    times = {
        name: settings.get(f"metrics_{name}", duration, getattr(default, name))
        for name in ("keep_events", "snapshot_every")
    }
    for name, seconds in times.items():
        if seconds <= 0:
            raise ValueError(f"{name} must be more than 0")
    return MetricsSettings(
        **read_registered_settings(settings, MetricsSettings.service, default.bind),
        **times,
        data_dir=settings.path("metrics_data_dir"),
    )
