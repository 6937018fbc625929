"""A forked child, such as a worker of a data loader, shows the line in which it hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from keepstep.stacks.child_processes import child_processes, work_done
from keepstep_mesh.threads import dumped_stacks
from keepstep_mesh.threads.dumped_stacks import accept_signal, file_of


def wait_in_a_worker(ready: int) -> None:
    os.write(ready, b"1")
    while True:
        time.sleep(60)  # the parent ends it


WORKS = """
import os
junk = bytearray(1 << 20)
with open("/dev/zero", "rb", 0) as zeros:
    for _ in range(50):
        zeros.readinto(junk)
print(flush=True)
input()
"""


def test_what_a_child_reads_counts_as_work_of_a_thread_that_waits_for_children() -> None:
    own = threading.get_native_id()
    with subprocess.Popen([sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert work_done(own, with_children=True) - work_done(own, with_children=False) >= 50
        child.communicate(b"\n")


def test_what_the_training_thread_reads_counts_as_work_and_what_others_read_does_not() -> None:
    own = threading.get_native_id()

    def read() -> None:
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            zeros.read(100 << 20)

    before = work_done(own, with_children=False)
    other = threading.Thread(target=read)
    other.start()
    other.join()
    assert work_done(own, with_children=False) - before < 50
    read()
    assert work_done(own, with_children=False) - before >= 100


def test_the_stacks_of_a_child_that_is_asked_again_and_again_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept_signal()
    monkeypatch.setattr(dumped_stacks, "MAX_BYTES", 4096)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            wait_in_a_worker(writing)
        os._exit(1)
    try:
        os.read(reading, 1)
        for _ in range(50):
            assert "wait_in_a_worker" in dumped_stacks.dumped_stacks(pid)
        file = file_of(pid)
        assert file is not None
        assert file.stat().st_size < 3 * 4096
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_a_forked_child_shows_its_stack_and_another_program_is_not_disturbed() -> None:
    accept_signal()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            wait_in_a_worker(writing)
        os._exit(1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            os.read(reading, 1)
            found = child_processes()
            assert any(f" {pid} " in one and "wait_in_a_worker" in one for one in found), found
            assert any(f" {other.pid} " in one for one in found), found
            assert other.poll() is None
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reading)
            os.close(writing)
            other.communicate(b"\n")
    assert other.returncode == 0
