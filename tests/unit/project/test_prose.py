"""docs/prose.py finds prose that an outsider stumbles over, and leaves plain prose alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROSE = Path(__file__).resolve().parents[3] / "docs" / "prose.py"


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", PROSE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        '"""Who asks nothing is cut."""',
        '"""What a route takes."""',
        '"""Close it.\n\nWhoever waits is woken."""',
        'fail(f"{size} bytes; at most {limit} are taken")',
        'log("it is told where it listens")',
        "x = 1  # nobody waits for it",
        "# The group lacks\n# two chunks",
        "# A text in which there\n# is a line end",
        'raise E("nobody answered" if x else "y", f"{x} is said of {y}")',
    ],
)
def test_a_known_pattern_is_found_in_docstrings_messages_and_comments(prose: ModuleType, text: str) -> None:
    assert list(prose.findings(Path("a.py"), text))


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the quorum that the group waits for."""',
        '"""What is missing? See ``nobody``, a reason."""',
        'fail(f"frame too large: {size} bytes (limit {limit})")',
        '"""A standby that takes over."""',
        "nobody = 1",
        'send("nobody")',
        "# The two cannot be told apart. The state is taken from the first group.",
    ],
)
def test_plain_prose_and_identifiers_pass(prose: ModuleType, text: str) -> None:
    assert list(prose.findings(Path("a.py"), text)) == []


def test_a_finding_has_the_line_of_its_first_word(prose: ModuleType) -> None:
    text = '"""A module.\n\nA sentence.\nNobody waits."""\n\n# Plain.\n# Here there\n# is more.\n'
    assert [(line, found) for line, found, _ in prose.findings(Path("a.py"), text)] == [(4, "Nobody"), (7, "there is")]


def test_code_blocks_and_inline_code_of_a_document_are_no_prose(prose: ModuleType) -> None:
    text = "# What it costs\n\n```\nnobody " + "x" * 130 + "\n```\n\nThe reason is `nobody`.\n"
    assert list(prose.findings(Path("a.md"), text)) == []


def test_long_lines_of_a_document_are_found_without_the_addresses_of_links(prose: ModuleType) -> None:
    link = f"A [page](https://example.com/{'x' * 120})."
    found = list(prose.findings(Path("a.md"), f"{link}\n\n{'word ' * 25}\n"))
    assert [(line, what) for line, what, _ in found] == [(3, "125 characters")]


def test_long_table_cells_of_a_document_are_found(prose: ModuleType) -> None:
    text = f"| a | b |\n|---|---|\n| Two. Are fine. | One. Too. Many. |\n| short | {'x' * 120} |\n| `a|b`. | 1.5 s |\n"
    assert [line for line, _, _ in prose.findings(Path("a.md"), text)] == [3, 4]


def test_the_list_of_exceptions_stays_short(prose: ModuleType) -> None:
    assert len(prose.EXCEPTIONS) <= 10
