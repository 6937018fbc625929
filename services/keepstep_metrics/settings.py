"""Settings of the metrics service. A flag overrides the environment, which overrides the file."""

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
    """Settings of one metrics service.

    Attributes:
        data_dir: Folder of the SQLite file; None: a restart loses the history.
        keep_events: Age at which events are deleted, in seconds.
        snapshot_every: Seconds between snapshots of the history, which replace the journal.
    """

    service = "metrics"

    bind: str = "127.0.0.1:29530"
    data_dir: Path | None = None
    keep_events: float = 30 * DAY
    snapshot_every: float = 300.0


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> MetricsSettings:
    """Return the settings of a metrics service.

    Args:
        flags: The flags of ``read_listen_settings``, fields of ``MetricsSettings``, ``lighthouse``.
        environ: Variables ``KEEPSTEP_METRICS_<NAME>`` and ``KEEPSTEP_LIGHTHOUSE``.

    Raises:
        ValueError: A value is invalid; the message names its source.
        AuthError: The tokens are invalid.
    """
    settings = settings_of_service(MetricsSettings.service, flags, environ)
    default = MetricsSettings()
    times = {
        name: settings.get(f"metrics_{name}", duration, getattr(default, name))
        for name in ("keep_events", "snapshot_every")
    }
    for name, seconds in times.items():
        if seconds <= 0:
            raise ValueError(f"invalid {name} {seconds:g}: expected more than 0")
    return MetricsSettings(
        **read_registered_settings(settings, MetricsSettings.service, default.bind),
        **times,
        data_dir=settings.path("metrics_data_dir"),
    )
