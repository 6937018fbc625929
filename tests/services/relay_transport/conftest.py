"""What tests of healing through relays share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpointing import relay_fetch, relay_upload


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wait for who is silent would be all that a test does: less of it."""
    monkeypatch.setattr(relay_fetch, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(relay_fetch, "CHUNK_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(relay_fetch, "LOST_SECONDS", 1.5)
    monkeypatch.setattr(relay_upload, "STALL_SECONDS", 1.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
