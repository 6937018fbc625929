"""Fixtures for tests of healing through relays."""

from __future__ import annotations

import pytest

from keepstep.transfer.relayed import relay_fetch, relay_upload


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wait for who is silent would be all that a test does: less of it."""
    monkeypatch.setattr(relay_fetch, "FETCH_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(relay_fetch, "CHUNK_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(relay_upload, "STALL_SECONDS", 1.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the source must send nothing that the relay has: a busy machine makes no joiner ask for it."""
    monkeypatch.setattr(relay_fetch, "FETCH_PATIENCE_SECONDS", 30.0)
    monkeypatch.setattr(relay_fetch, "CHUNK_WAIT_SECONDS", 2)
    monkeypatch.setattr(relay_fetch, "LOST_SECONDS", 60.0)
    monkeypatch.setattr(relay_upload, "STALL_SECONDS", 30.0)


@pytest.fixture(scope="session", autouse=True)
def scripts_start_at_once(fork_server_of_scripts: None) -> None:
    """Start peers without a wait for imports."""
