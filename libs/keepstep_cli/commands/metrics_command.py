"""``keepstep metrics``: a metrics service in this process, until a signal ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from keepstep_cli.asking.options import Seconds
from keepstep_cli.running.service_options import service_options
from keepstep_cli.running.services import importing, run_service

DEFAULT_PORT = 29530


@click.command(short_help="Run a metrics service: history, goodput, failures of all jobs.")
@service_options(DEFAULT_PORT)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for its data; without it, nothing survives a restart.",
)
@click.option("--keep-events", type=Seconds(), help="Delete older events.  [default: 30d]")
@click.option("--snapshot-every", type=Seconds(), help="Time between snapshots of the history.  [default: 5m]")
@click.option(
    "--lighthouse",
    metavar="URL[,URL]",
    help="Lighthouse to register with, so that senders find the service.  [env: KEEPSTEP_LIGHTHOUSE]",
)
@click.option("--name", help="Name for the registration.  [default: host and port]")
@click.option("--advertise", metavar="URL", help="Address for senders.  [default: where it listens]")
def metrics(**flags: Any) -> None:
    """Run a metrics service: the history of each group, and the cost and cause of failures.

    Times are seconds, or 500ms, 2m. Every flag is also a variable: --data-dir is KEEPSTEP_METRICS_DATA_DIR.
    """
    with importing("a metrics service"):
        from keepstep_metrics.app import hosted_metrics
        from keepstep_metrics.settings import read_settings
    run_service("metrics", flags, read_settings, hosted_metrics)
