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
    help="Folder of its data; without one nothing survives a restart.",
)
@click.option("--keep-events", type=Seconds(), help="Forget events that are older.  [default: 30d]")
@click.option("--snapshot-every", type=Seconds(), help="Time between snapshots of the history.  [default: 5m]")
@click.option(
    "--lighthouse", metavar="URL[,URL]", help="Where to register, so that senders find it.  [env: KEEPSTEP_LIGHTHOUSE]"
)
@click.option("--name", help="Under which it registers.  [default: host and port]")
@click.option("--advertise", metavar="URL", help="Where senders reach it.  [default: where it listens]")
def metrics(**flags: Any) -> None:
    """Run a metrics service: what each group did when, what failures cost, and why.

    Times are seconds, or 500ms, 2m. Every flag is also a variable: --data-dir is KEEPSTEP_METRICS_DATA_DIR.
    """
    with importing("a metrics service"):
        from keepstep_metrics.app import hosted_metrics
        from keepstep_metrics.settings import read_settings
    run_service("metrics", flags, read_settings, hosted_metrics)
