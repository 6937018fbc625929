"""``python -m keepstep_metrics``: the metrics service as a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from keepstep_mesh.config.settings import duration
from keepstep_mesh.serving import program
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint
from keepstep_metrics.app import Metrics
from keepstep_metrics.settings import MetricsSettings, read_settings


def hosted_metrics(settings: MetricsSettings, started: Callable[[Endpoint], None]) -> Hosted:
    """For ``process.run_services``. ``started`` is told where it listens."""
    return Hosted(lambda: Metrics(settings).service(), settings, started)


def _parser() -> argparse.ArgumentParser:
    parser = program.parser_of("keepstep_metrics", "Keeps the history of all jobs.", MetricsSettings.bind)
    parser.add_argument("--data-dir", type=Path, help="folder of its data (none: nothing survives a restart)")
    parser.add_argument("--lighthouse", help="http://host:port[,...] of the lighthouses to register with")
    parser.add_argument("--name", help="under which it registers (host and port)")
    parser.add_argument("--keep-events", type=duration, help="how long events are kept (30d)")
    parser.add_argument("--snapshot-every", type=duration, help="time between snapshots of the history (5m)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    return program.main(
        "metrics", _parser(), lambda flags, started: hosted_metrics(read_settings(flags), started), arguments
    )


if __name__ == "__main__":
    sys.exit(main())
