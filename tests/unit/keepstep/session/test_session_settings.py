"""Settings of a session that a worker reads from its environment."""

from __future__ import annotations

import importlib.metadata

import pytest

from keepstep.session import session_settings
from keepstep.session.session_settings import SessionSettings


def settings() -> SessionSettings:
    return SessionSettings.from_environment(("http://127.0.0.1:9",), "a:1", connect_timeout=1.0)


def test_the_worker_sends_name_and_version_of_its_library() -> None:
    assert settings().library == f"keepstep {importlib.metadata.version('keepstep')}"


def test_a_library_that_was_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(session_settings, "version", version)
    assert settings().library == "keepstep"
