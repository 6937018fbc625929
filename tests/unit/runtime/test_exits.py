"""A rank that is to end ends, whoever listens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keepstep_mesh.exit_codes import EXIT_GROUP_FAILED

PROGRAM = """
import os, threading
from keepstep.runtime.exits import end_process
ending = threading.Thread(target=end_process, args=("a peer died",))
ending.start()
ending.join(30)
os._exit(1)
"""


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    try:
        while True:
            os.write(pipe, bytes(4096))
    except BlockingIOError:
        os.set_blocking(pipe, True)


@pytest.mark.parametrize("reader", ["is gone", "does not read"])
def test_a_rank_ends_although_nobody_takes_its_last_words(reader):
    theirs, ours = os.pipe()
    if reader == "is gone":
        os.close(theirs)
    else:
        fill(ours)
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stdout=ours, stderr=ours, timeout=60, check=False)
    assert ended.returncode == EXIT_GROUP_FAILED
