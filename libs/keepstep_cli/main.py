"""The ``keepstep`` command. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from typing import Any

import click

from keepstep_chaos.commands.chaos_command import chaos
from keepstep_chaos.commands.check_history import check_history
from keepstep_chaos.commands.inject_command import inject
from keepstep_cli.asking.sections import SectionedGroup
from keepstep_cli.commands import admin
from keepstep_cli.commands.checkpoint import checkpoint
from keepstep_cli.commands.completion import completion
from keepstep_cli.commands.demo import demo
from keepstep_cli.commands.doctor_command import doctor
from keepstep_cli.commands.metrics_command import metrics
from keepstep_cli.commands.relay_command import relay
from keepstep_cli.commands.restart import restart
from keepstep_cli.commands.run import run
from keepstep_cli.commands.serve import lighthouse, up
from keepstep_cli.running.console.standard_output import check_standard_output

SECTIONS = {
    "Try and train": ("demo", "run", "restart"),
    "Services": ("up", "lighthouse", "relay", "metrics"),
    "See": ("status", "jobs", "replicas", "inspect", "quorum", "events", "transfers"),
    "Change": ("drain", "replace", "evict", "readmit", "policy", "job"),
    "Check": ("doctor", "verify-replicas", "check-history", "chaos", "inject"),
    "Checkpoints and shell": ("checkpoint", "completion"),
}


class Keepstep(SectionedGroup):
    """Raise ``Unwritable`` if the output cannot be written."""

    def main(self, *arguments: Any, **how: Any) -> Any:
        check_standard_output()
        return super().main(*arguments, **how)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        finally:
            sys.stdout.flush()


@click.group(cls=Keepstep, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="keepstep", prog_name="keepstep")
def main() -> None:
    """Fault-tolerant PyTorch training."""


for command in (
    up,
    lighthouse,
    relay,
    metrics,
    run,
    restart,
    demo,
    chaos,
    inject,
    *admin.COMMANDS,
    doctor,
    checkpoint,
    check_history,
    completion,
):
    main.add_command(command)
