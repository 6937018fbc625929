"""A rank that must end ends, with or without a reader of its output."""

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


SIGNALLED = """
import os, signal
from keepstep.runtime.exits import TerminationFlag
reader, pipe = os.pipe()
if {reader_ends}:
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
os.close(pipe)
leaving = []
flag = TerminationFlag(leaving.append)
print("before", end=" ")
os.kill(os.getpid(), signal.SIGTERM)
os.close(reader)
for _ in range({lines}):
    print("y" * 999)
os._exit(9) if leaving != ["SIGTERM"] else None
"""


@pytest.mark.parametrize("lines", [0, 100])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_trainer_leaves_in_order_when_sigterm_also_ends_the_reader_of_its_output(lines, buffered):
    program = SIGNALLED.format(reader_ends=True, lines=lines)
    environment = os.environ | {"PYTHONUNBUFFERED": buffered}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=False)
    assert ended.returncode == 0


def test_output_around_a_sigterm_is_kept_while_a_process_reads_it():
    program = SIGNALLED.format(reader_ends=False, lines=2)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["before", "y" * 999, "y" * 999]
