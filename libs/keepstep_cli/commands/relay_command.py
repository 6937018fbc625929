"""``keepstep relay``: a relay in this process, until a signal ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from keepstep_cli.asking.options import Seconds, Size, all_of
from keepstep_cli.running.service_options import service_options
from keepstep_cli.running.services import importing, run_service

DEFAULT_PORT = 29520

_tier_options = all_of(
    click.option("--memory", type=Size(), help="Memory tier, at least 64MiB.  [default: 4GiB]"),
    click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for the disk tier; without it, nothing survives a restart.",
    ),
    click.option(
        "--durable", metavar="URL", help="Destination for durable checkpoints: file:///path, s3://bucket/path ..."
    ),
    click.option(
        "--memory-checkpoints",
        type=click.IntRange(0),
        help="Durable checkpoints to keep per job in a relay that only has memory; 0: refuse them.  [default: 0]",
    ),
    click.option("--keep-live", type=click.IntRange(0), help="Live checkpoints to keep per job; 0: all.  [default: 2]"),
    click.option(
        "--keep-durable", type=click.IntRange(0), help="Durable checkpoints to keep per job; 0: all.  [default: 0]"
    ),
    click.option(
        "--durable-ttl",
        type=Seconds(),
        help="Drop the durable checkpoints of a job that no process used for this time.  [default: never]",
    ),
    click.option(
        "--durable-age",
        type=Seconds(),
        help="Drop durable checkpoints older than this, except the newest.  [default: never]",
    ),
)
_limit_options = all_of(
    click.option(
        "--upload-timeout",
        type=Seconds(),
        help="Abort an upload with a rank that is silent for this time.  [default: 60]",
    ),
    click.option(
        "--processes",
        type=click.IntRange(1, 64),
        help="Processes that serve the port, to use several cores.  [default: 1]",
    ),
    click.option("--max-checkpoints", type=click.IntRange(1), help="Maximum number of checkpoints.  [default: 1000]"),
    click.option("--max-chunks", type=click.IntRange(1), help="Maximum number of chunks.  [default: 1000000]"),
)


@click.command(short_help="Run a relay, which passes live states on.")
@service_options(DEFAULT_PORT)
@_tier_options
@_limit_options
@click.option(
    "--lighthouse",
    metavar="URL[,URL]",
    help="Lighthouse to register with, so that workers find the relay.  [env: KEEPSTEP_LIGHTHOUSE]",
)
@click.option("--name", help="Name for the registration.  [default: host and port]")
@click.option("--advertise", metavar="URL", help="Address for workers.  [default: where it listens]")
def relay(**flags: Any) -> None:
    """Run a relay: it receives a state once, and passes it on to any number of readers, also during the upload.

    Times are seconds, or 500ms, 2m. Every flag is also a variable: --data-dir is KEEPSTEP_RELAY_DATA_DIR.
    """
    with importing("a relay"):
        from keepstep_relay.app import hosted_relay
        from keepstep_relay.settings import read_settings
    run_service("relay", flags, read_settings, hosted_relay)
