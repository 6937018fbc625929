"""The trainers of the training tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def scripts_start_at_once(fork_server_of_scripts: None) -> None:
    """Start trainers without a wait for imports."""
