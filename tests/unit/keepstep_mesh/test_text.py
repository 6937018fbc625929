"""Text of messages for people."""

from __future__ import annotations

import pytest

from keepstep_mesh.text import bytes_text, listed, printable


@pytest.mark.parametrize(
    ("names", "text"), [("", ""), ("a", "a"), ("ab", "a, b"), ("abc", "a, b and 1 more"), ("abcde", "a, b and 3 more")]
)
def test_names_beyond_the_limit_are_counted(names: str, text: str) -> None:
    assert listed(names, limit=2) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (4198, "4.1 KiB"), (9 << 20, "9.0 MiB"), (3 << 40, "3072.0 GiB")]
)
def test_a_size_is_in_the_largest_unit_up_to_gib(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer 日本", "größer 日本"),
        ("a\x1b[2J\x9b1m\x7f", r"a\x1b[2J\x9b1m\x7f"),
        ("a\nb\r", r"a\nb\r"),
        ("\u202e\u2028\udc80", r"\u202e\u2028\udc80"),
    ],
)
def test_characters_that_a_terminal_obeys_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text, keep="\n\r").count("\n") == text.count("\n")
