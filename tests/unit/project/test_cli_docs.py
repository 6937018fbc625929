"""docs/cli.md has every command and exit code, docs/reference.md every flag, and no page an unknown one."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from keepstep_cli import errors
from keepstep_cli.main import main

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "cli.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
SECTION = r"^{}# keepstep ([\w-]+)\n(.*?)(?=^##+ |\Z)"
FLAGS = dict(re.findall(SECTION.format("##"), REFERENCE, re.MULTILINE | re.DOTALL))
FLAG = r"(?<![\w-])--?[a-z][\w-]*"


def flags_of(command: str, *, hidden: bool) -> set[str]:
    found = main.all_commands()[command]
    parts = found.commands.values() if isinstance(found, click.Group) else [found]
    options = [one for part in parts for one in part.params if isinstance(one, click.Option)]
    return {flag for one in options if hidden or not one.hidden for flag in one.opts}


def test_every_command_has_its_section_and_the_other_way_round() -> None:
    sections = dict(re.findall(SECTION.format("#"), TEXT, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(FLAGS) == set(main.all_commands())
    assert not [name for name, text in sections.items() if not text.strip()]


@pytest.mark.parametrize("command", sorted(main.all_commands()))
def test_every_flag_is_in_the_reference_and_the_other_way_round(command: str) -> None:
    torchft = {flag for flag in flags_of(command, hidden=False) if "_" in flag}
    rows = re.findall(r"^\| (.*?) \||^\[Common flags\](.*)$", FLAGS[command], re.MULTILINE)
    assert {flag for row in rows for flag in re.findall(rf"`({FLAG})", " ".join(row))} == flags_of(
        command, hidden=False
    ) - torchft
    assert not [flag for flag in torchft if flag not in TEXT]


def test_every_command_that_is_shown_is_one_that_there_is_with_flags_that_it_has() -> None:
    shown = 0
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text().replace("\\\n", " ")
        fences = "\n".join(re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE))
        in_fences = re.findall(r"^(?:eval \"\$\(|[A-Z_]+=\S+ )*keepstep ([a-z-]+)(.*)$", fences, re.MULTILINE)
        for command, rest in [*in_fences, *re.findall(r"`keepstep ([a-z-]+)([^`]*)`", text)]:
            shown += 1
            assert command in main.all_commands(), f"{page.name}: keepstep {command}"
            own = re.sub("'[^']*'", "", rest)  # without the commands that it is given
            flags = set(re.findall(FLAG, re.split(r" -- | #|\)\"", own)[0]))
            assert flags <= flags_of(command, hidden=True) | {"--help"}, f"{page.name}: keepstep {command}{rest}"
    assert shown >= 100


def test_every_exit_code_is_documented() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d) \|", TEXT, re.MULTILINE)}
    raised = (errors.Unreachable, errors.Refused, errors.Missing, errors.Unwritable, errors.Wedged)
    assert listed == {0, 1, 2} | {one.exit_code for one in raised}


def test_no_summary_of_a_command_is_cut() -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2]


@pytest.mark.parametrize("command", sorted(main.all_commands()))
def test_every_flag_of_a_command_is_in_its_help(command: str) -> None:
    found = main.all_commands()[command]
    parts = [[name] for name in found.commands] if isinstance(found, click.Group) else [[]]
    shown = "".join(CliRunner().invoke(main, [command, *part, "--help"]).output for part in parts)
    assert not [flag for flag in flags_of(command, hidden=False) if flag not in shown]
    assert "\\" not in shown, "an escape that was meant for click"
