"""The ``keepstep`` command. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

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


LATE_COMMANDS = {
    "chaos": ("keepstep_chaos.commands.chaos", "chaos"),
    "inject": ("keepstep_chaos.commands.inject", "inject"),
    "check-history": ("keepstep_chaos.commands.check_history", "check_history"),
}
"""Module and name of the commands of other packages, which are loaded when they are used."""


class Keepstep(SectionedGroup):
    """The commands of this package and ``LATE_COMMANDS``. Raises ``Unwritable`` if the output cannot be written."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*super().list_commands(ctx), *LATE_COMMANDS))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LATE_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = LATE_COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), name)
        return command

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
    *admin.COMMANDS,
    doctor,
    checkpoint,
    completion,
):
    main.add_command(command)
