"""Peers that start at once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def scripts_start_at_once(fork_server_of_scripts: None) -> None:
    """Start peers without a wait for imports."""
