"""Variables of a launcher that a process reads."""

from __future__ import annotations

import pytest

from keepstep.runtime.environment import restart_count


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, 3),
        ({"TORCHELASTIC_RESTART_COUNT": "3", "GROUP_WORLD_SIZE": "1"}, 3),
        ({"TORCHELASTIC_RESTART_COUNT": "often"}, 0),
    ],
)
def test_the_restarts_of_a_group_are_those_that_its_launcher_counts(monkeypatch, variables, count) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert restart_count() == count


def test_counts_of_several_torchruns_of_one_group_are_not_compared(monkeypatch) -> None:
    """A torchrun that takes the place of another one counts from 0."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for count in ("0", "4"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert restart_count() == 0
