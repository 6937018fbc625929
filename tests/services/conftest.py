"""Fixtures for tests of several services."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpointing import HTTPTransport
from tests.support.checkpoints.checkpoint_peer import MINUTE


@pytest.fixture
def transports():
    """Makes transports on loopback and shuts them down."""
    made = []

    def make(num_chunks=0, timeout=MINUTE, token=None):
        made.append(HTTPTransport(timeout, num_chunks, hostname="127.0.0.1", token=token))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of so many bytes, as ``mount`` writes them."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
