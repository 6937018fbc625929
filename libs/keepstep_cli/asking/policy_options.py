"""The options for the fields of a job's policy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from keepstep_cli.asking.options import Command, Seconds, all_of
from keepstep_mesh.protocol.policy import SECONDS, SETTINGS, STEPS, Policy, Setting

DAY = 86400


class SecondsOrNone(Seconds):
    """Seconds, or ``none`` to use the default."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "none" else super().convert(value, param, ctx)


def new_job_policy(command: Command) -> Command:
    """Add an option for each field, with its default in the help."""
    spellings = {"min_replicas": ("--min_replicas",)}  # of torchft_lighthouse
    return all_of(
        *(
            click.option(
                *(_flag(one.name), *spellings.get(one.name, ())),
                type=_type(SETTINGS[one.name]),
                metavar=_metavar(SETTINGS[one.name]),
                help=f"{SETTINGS[one.name].help}.  [default: {_shown(SETTINGS[one.name], one.default)}]",
            )
            for one in fields(Policy)
        )
    )(command)


def policy_change(command: Command) -> Command:
    """Add an option for each field. A field that may be None may become ``none`` again."""
    return all_of(
        *(
            click.option(
                _flag(name),
                type=SecondsOrNone() if setting.none else _type(setting),
                metavar=_metavar(setting),
                help=f"{setting.help}; none: {setting.none}." if setting.none else f"{setting.help}.",
            )
            for name, setting in SETTINGS.items()
        )
    )(command)


def _type(setting: Setting) -> click.ParamType[Any]:
    if setting.choices:
        return click.Choice(setting.choices)
    if not setting.unit:
        return click.BOOL
    return Seconds() if setting.unit == SECONDS else click.IntRange(int(setting.lowest))


def _metavar(setting: Setting) -> str | None:
    return "STEPS" if setting.unit == STEPS else None


def _shown(setting: Setting, default: Any) -> str:
    if default is None:
        return setting.none
    if setting.unit != SECONDS:
        return str(default).lower()
    return f"{default / DAY:g}d" if default and default % DAY == 0 else f"{default:g}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
