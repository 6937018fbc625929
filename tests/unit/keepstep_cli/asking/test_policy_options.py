"""The flags of a job's policy show what the policy declares."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest

from keepstep_cli.asking.policy_options import new_job_policy, policy_change
from keepstep_mesh.protocol.policy import SETTINGS, Policy


@click.command
@new_job_policy
def new(**given: Any) -> None:
    """Create a job."""


@click.command
@policy_change
def change(**given: Any) -> None:
    """Change a policy."""


@pytest.mark.parametrize("command", [new, change])
def test_each_field_of_the_policy_has_a_flag_with_its_meaning(command: click.Command) -> None:
    helps = {one.name: one.help for one in command.params if isinstance(one, click.Option)}
    assert helps.keys() == SETTINGS.keys()
    for name, setting in SETTINGS.items():
        assert (helps[name] or "").startswith(setting.text)


@pytest.mark.parametrize("field", [one for one in fields(Policy) if one.default is not None], ids=lambda one: one.name)
def test_the_default_in_the_help_is_one_that_the_flag_takes(field: Any) -> None:
    option = next(one for one in new.params if one.name == field.name)
    assert isinstance(option, click.Option)
    shown = (option.help or "").rpartition("[default: ")[2].removesuffix("]")
    assert option.type.convert(shown, None, None) == field.default
