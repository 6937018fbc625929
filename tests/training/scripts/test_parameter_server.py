"""examples/parameter_server.py as a user runs it: a server and its clients, one of which is killed."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import example
from tests.support.services.command import environment

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).parents[3] / "examples" / "parameter_server.py"
DEADLINE = 120.0


@contextlib.contextmanager
def run(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, example.__file__, str(SCRIPT), *arguments]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(OMP_NUM_THREADS="1"), **how) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_client_trains_the_model_after_another_was_killed() -> None:
    """Slow: the server and its spawner import torch."""
    with run() as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with run(address) as killed:
            assert re.fullmatch(r"session \w{8} begins\n", server.stdout.readline())
            killed.kill()
        with run(address) as client:
            assert re.fullmatch(r"session \w{8} begins\n", server.stdout.readline())
            assert client.wait(DEADLINE) == 0, client.communicate()
        end = re.fullmatch(r"session \w{8} ends, accuracy ([\d.]+)\n", server.stdout.readline())
        assert end is not None
        assert float(end[1]) > 0.8
        server.send_signal(signal.SIGINT)
        assert server.wait(DEADLINE) != 1
