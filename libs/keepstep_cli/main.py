"""The ``keepstep`` command. Each command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from keepstep_cli.errors import Unwritable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SECTIONS = {
    "Try and train": ("demo", "run", "restart"),
    "Services": ("up", "lighthouse", "relay", "metrics"),
    "See": ("status", "jobs", "replicas", "inspect", "quorum", "events", "stacks", "incidents", "transfers"),
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


class _File(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Redirect the rest of the buffer, or Python prints an error when it exits.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise Unwritable(f"the output cannot be written: {error.strerror}") from error


def check_standard_output() -> None:
    """Make writes to standard output raise ``Unwritable``, unless it was replaced. If it is closed, use /dev/null.

    Escapes characters that the terminal or locale does not support.
    """
    stream = sys.stdout
    if stream is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    elif stream is sys.__stdout__ and isinstance(stream, io.TextIOWrapper):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_File(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering or stream.write_through,
        )
    elif isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


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
