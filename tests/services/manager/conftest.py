"""A lighthouse for the Managers of a test, and the history of what they did."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.coordination import LighthouseServer
from keepstep.process_group.torch_backends import disposal
from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import violation_lines


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000)
    yield server.address()
    server.shutdown()


@pytest.fixture(autouse=True)
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The step log of all Managers of a test, which has to be a valid history."""
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("KEEPSTEP_STEP_LOG", str(path))
    yield path
    if path.exists():
        report = check_files([path])
        assert report.fine, "\n".join(violation_lines(report))


@pytest.fixture(autouse=True)
def disposed() -> Iterator[None]:
    """Wait until the communicators of a test are freed.

    Gloo does not wake an operation whose peer closed its connection in the middle of a message. The operation ends by
    its own timeout, 20 s here, and the thread that frees its communicator ends after it.
    """
    yield
    for thread in tuple(disposal._disposals):
        thread.join(40)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[tuple[str, int]]:
    """Why and with which code a rank was to end, in place of its end."""
    told: queue.Queue[tuple[str, int]] = queue.Queue()
    monkeypatch.setattr("keepstep.lifecycle.membership.end_process", lambda reason, code: told.put((reason, code)))
    return told
