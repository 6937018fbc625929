"""The help of long commands in sections."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from keepstep_cli.asking.sections import SectionedCommand
from keepstep_cli.main import main

LONG = ("run", "up", "lighthouse")


@pytest.mark.parametrize("name", LONG)
def test_every_option_of_a_long_command_is_in_a_section_once(name: str) -> None:
    command = main.all_commands()[name]
    assert isinstance(command, SectionedCommand)
    listed = [flag for flags in command.sections.values() for flag in flags]
    assert len(listed) == len(set(listed))
    flags = {one.opts[0] for one in command.params if isinstance(one, click.Option) and not one.hidden}
    assert flags <= set(listed)
    # in a process of its own: click keeps the help option of the first context, and other tests make some without -h
    done = subprocess.run(
        [sys.executable, "-m", "keepstep_cli", name, "--help"], capture_output=True, text=True, check=True
    )
    _, _, shown = done.stdout.partition(f"{next(iter(command.sections))}:")
    places = {flag: [one.start() for one in re.finditer(rf"^  {flag}(?![-\w])", shown, re.MULTILINE)] for flag in flags}
    assert {flag for flag, found in places.items() if len(found) != 1} == set()
    assert shown.index("  -h, --help") > max(place for (place,) in places.values())


def test_every_command_is_in_a_section_once_and_every_name_is_a_command() -> None:
    listed = [name for names in main.sections.values() for name in names]
    assert sorted(listed) == sorted(main.all_commands())
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(shown.count(f"\n  {name} ") == 1 for name in listed)
    assert shown.index("Try and train") < shown.index("\n  run ") < shown.index("Services") < shown.index("\n  relay ")
