"""docs/cli.md names every command, every flag and every exit code, and none that does not exist."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from keepstep_cli import errors
from keepstep_cli.main import main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## keepstep ([\w-]+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
SHARED = re.search(r"^## Which lighthouse.*?(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
OF_ANOTHER = {"up": "lighthouse"}
"""A section that says that it takes the flags of another."""


def flags_of(command: str, *, hidden: bool) -> set[str]:
    found = main.commands[command]
    parts = found.commands.values() if isinstance(found, click.Group) else [found]
    options = [one for part in parts for one in part.params if isinstance(one, click.Option)]
    return {flag for one in options if hidden or not one.hidden for flag in one.opts}


def documented(text: str) -> set[str]:
    """Flags in the first column of the tables."""
    rows = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)}


def test_every_command_has_its_section_and_the_other_way_round() -> None:
    assert set(SECTIONS) == set(main.commands)


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_flag_is_documented(command: str) -> None:
    assert SHARED is not None
    known = documented(SECTIONS[command]) | documented(SHARED[0])
    if command in OF_ANOTHER:
        known |= documented(SECTIONS[OF_ANOTHER[command]])
    torchft = {flag for flag in flags_of(command, hidden=False) if "_" in flag}
    assert not flags_of(command, hidden=False) - torchft - known
    assert not [flag for flag in torchft if flag not in TEXT]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_documented_flag_exists(command: str) -> None:
    assert not documented(SECTIONS[command]) - flags_of(command, hidden=True)


def test_every_exit_code_is_documented() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d) \|", TEXT, re.MULTILINE)}
    raised = (errors.Unreachable, errors.Refused, errors.Missing, errors.Unwritable)
    assert listed == {0, 1, 2} | {one.exit_code for one in raised}


def test_no_summary_of_a_command_is_cut() -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_flag_of_a_command_is_in_its_help(command: str) -> None:
    found = main.commands[command]
    parts = [[name] for name in found.commands] if isinstance(found, click.Group) else [[]]
    shown = "".join(CliRunner().invoke(main, [command, *part, "--help"]).output for part in parts)
    assert not [flag for flag in flags_of(command, hidden=False) if flag not in shown]
    assert "\\" not in shown, "an escape that was meant for click"
