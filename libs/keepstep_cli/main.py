"""The ``keepstep`` command. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import io
import sys

import click

from keepstep_cli import admin
from keepstep_cli.check_history import check_history
from keepstep_cli.checkpoint import checkpoint
from keepstep_cli.completion import completion
from keepstep_cli.demo import demo
from keepstep_cli.metrics import metrics
from keepstep_cli.relay import relay
from keepstep_cli.run import run
from keepstep_cli.serve import lighthouse, up


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="keepstep", prog_name="keepstep")
def main() -> None:
    """Keeps PyTorch training in step while its machines fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have what a terminal or a locale has not


for command in (up, lighthouse, relay, metrics, run, demo, *admin.COMMANDS, checkpoint, check_history, completion):
    main.add_command(command)
