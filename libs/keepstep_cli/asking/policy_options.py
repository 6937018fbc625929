"""The options for the fields of a job's policy."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from keepstep_cli.asking.options import Command, Seconds, all_of


class SecondsOrNone(Seconds):
    """Seconds, or ``none`` to use the default."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "none" else super().convert(value, param, ctx)


class Field(NamedTuple):
    """A field of the lighthouse's ``Policy``. ``default``: of a new job, as help texts show it."""

    name: str
    type: click.ParamType[Any]
    default: str
    help: str
    metavar: str | None = None


_COUNT, _SECONDS = click.IntRange(0), Seconds()
_ACTIONS = click.Choice(["heal", "drain", "report"])
FIELDS = (
    Field("min_replicas", click.IntRange(1), "1", "Minimum number of groups in a quorum"),
    Field("max_replicas", _COUNT, "0", "Maximum number of groups in a quorum; 0: no limit"),
    Field("initial_replicas", _COUNT, "0", "Groups that the first quorum of a job waits for, up to the join timeout"),
    Field("join_timeout", _SECONDS, "60", "Maximum wait for groups that have not asked"),
    Field("heal_timeout", _SECONDS, "60", "Maximum wait for a group that heals"),
    Field("heartbeat_timeout", _SECONDS, "5", "A group that is silent for this time is lost"),
    Field("reconnect_grace", _SECONDS, "0.2", "Time in which a group may reconnect after its connection broke"),
    Field("takeover_grace", _SECONDS, "the heartbeat timeout", "Time after a restart in which no group is lost"),
    Field(
        "verify_every",
        _COUNT,
        "1000",
        "Compare the weights of all groups at each step that this divides, at the steps 10 and 100, after changes of "
        "members and heals, and at the end; 0: never",
        "STEPS",
    ),
    Field("on_divergence", _ACTIONS, "heal", "Action for a group whose weights differ from the majority"),
    Field(
        "drain_straggler_after",
        _COUNT,
        "0",
        "Drain a group that was a straggler for this many steps in a row; 0: never",
        "STEPS",
    ),
    Field(
        "refuse_going_back",
        click.BOOL,
        "false",
        "Refuse a start more than one step below the step that the job has reached",
    ),
    Field("finish_grace", _SECONDS, "30", "Time for which groups that have finished wait for a lost group to return"),
    Field("job_ttl", _SECONDS, "7d", "Delete a job after this time without sessions; 0: never"),
)


def new_job_policy(command: Command) -> Command:
    """Add an option for each field, with its default in the help."""
    spellings = {"min_replicas": ("--min_replicas",)}  # of torchft_lighthouse
    return all_of(
        *(
            click.option(
                _flag(field),
                *spellings.get(field.name, ()),
                type=field.type,
                metavar=field.metavar,
                help=f"{field.help}.  [default: {field.default}]",
            )
            for field in FIELDS
        )
    )(command)


def policy_change(command: Command) -> Command:
    """Add an option for each field. ``takeover_grace`` may become ``none`` again."""
    return all_of(
        *(
            click.option(
                _flag(field),
                type=SecondsOrNone() if field.name == "takeover_grace" else field.type,
                metavar=field.metavar,
                help=f"{field.help}; none: {field.default}." if field.name == "takeover_grace" else f"{field.help}.",
            )
            for field in FIELDS
        )
    )(command)


def _flag(field: Field) -> str:
    return f"--{field.name.replace('_', '-')}"
