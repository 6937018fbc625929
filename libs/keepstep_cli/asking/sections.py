"""Help texts in sections: the options of a long command, and the commands of ``keepstep``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

Sections = Mapping[str, Sequence[str]]
"""Titles, and the names below each: flags of options, or commands. Names that are missing come last."""


def _write(formatter: click.HelpFormatter, sections: Sections, rows: Mapping[str, tuple[str, str]], rest: str) -> None:
    named = {name for names in sections.values() for name in names}
    others = [name for name in rows if name not in named]
    for title, names in [*sections.items(), (rest, others)]:
        if shown := [rows[name] for name in names if name in rows]:
            with formatter.section(title):
                formatter.write_dl(shown)


class SectionedCommand(click.Command):
    """A command that shows its options in ``sections``."""

    def __init__(self, *arguments: Any, sections: Sections, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {one.opts[0]: row for one in self.get_params(ctx) if (row := one.get_help_record(ctx)) is not None}
        _write(formatter, self.sections, rows, "Options")


class SectionedGroup(click.Group):
    """A group that shows its commands in ``sections``."""

    def __init__(self, *arguments: Any, sections: Sections, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.sections = sections

    def all_commands(self) -> dict[str, click.Command]:
        """Return every command by its name, also those that are loaded when they are used."""
        ctx = click.Context(self)
        found = {name: self.get_command(ctx, name) for name in (*self.commands, *self.list_commands(ctx))}
        return {name: one for name, one in found.items() if one is not None}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        commands = self.all_commands()
        width = formatter.width - 6 - max(map(len, commands))
        rows = {name: (name, one.get_short_help_str(width)) for name, one in commands.items()}
        _write(formatter, self.sections, rows, "Other commands")
