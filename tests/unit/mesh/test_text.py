"""Text of messages for people."""

from __future__ import annotations

import pytest

from keepstep_mesh.text import listed


@pytest.mark.parametrize(
    ("names", "text"), [("", ""), ("a", "a"), ("ab", "a, b"), ("abc", "a, b and 1 more"), ("abcde", "a, b and 3 more")]
)
def test_names_beyond_the_limit_are_counted(names: str, text: str) -> None:
    assert listed(names, limit=2) == text
