"""The watchdog ends a process that is stuck, and no other one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from keepstep_mesh.exit_codes import EXIT_WATCHDOG
from keepstep_mesh.threads.starting import Thread


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


NO_MEMORY = """
import resource, threading
from keepstep_mesh.threads import starting, watchdog
watchdog.WATCHDOG_START_SECONDS = 0.5
all_run = threading.Barrier(8)
threads = [threading.Thread(target=all_run.wait) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()  # glibc keeps their stacks for further threads: these start, and find no memory then
thread = starting.Thread(target=int)
resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
thread.start()
"""


def test_a_process_ends_whose_watchdog_gets_no_memory_to_start() -> None:
    ended = run(NO_MEMORY)
    assert ended.returncode == EXIT_WATCHDOG, ended.stderr
    assert "the watchdog did not start (is memory missing?); ending this process (exit 70)" in ended.stderr


STUCK = """
import threading
from keepstep_mesh.threads import starting
starting.THREAD_END_SECONDS = 0.2
thread = starting.Thread(target=threading.Event().wait, name="stuck", daemon=True)
thread.start()
thread.join_or_end_process()
"""
IN_A_CHILD = """
import os, threading
from keepstep_mesh.threads.watchdog import watched
with watched("the parent", 60):
    child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with watched("the end of thread 'stuck'", 0.2):
    threading.Event().wait()
"""


@pytest.mark.parametrize("program", [STUCK, IN_A_CHILD], ids=["here", "in a forked child"])
def test_a_process_ends_whose_thread_does_not_end(program: str) -> None:
    ended = run(program)
    assert ended.returncode == EXIT_WATCHDOG, ended.stderr
    assert "the end of thread 'stuck' has been stuck for 0.2 s; ending this process (exit 70)" in ended.stderr


def test_a_thread_that_ended_is_joined() -> None:
    thread = Thread(target=int)
    thread.start()
    thread.join_or_end_process()
    assert not thread.is_alive()


FROZEN = """
import sys
from keepstep_mesh.threads.watchdog import watched
with watched("the block", 1.0):
    print("begun", flush=True)
    sys.stdin.readline()
print("done")
"""


def test_a_process_that_was_stopped_for_longer_than_its_limit_goes_on() -> None:
    program = [sys.executable, "-c", FROZEN]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as frozen:
        assert frozen.stdin is not None
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == "begun\n"
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(3)  # its limit, and more than two turns
        frozen.send_signal(signal.SIGCONT)
        frozen.stdin.write("\n")
        frozen.stdin.flush()
        assert frozen.stdout.readline() == "done\n"
        assert frozen.wait(30) == 0


HELD = """
import sys, threading
from keepstep_mesh.threads.ending import end_now
class Held:
    def write(self, _):
        threading.Event().wait()
sys.stderr = Held()
end_now("stuck", 70)
"""


def test_the_reason_is_printed_although_another_thread_holds_the_lock_of_standard_error() -> None:
    ended = run(HELD)
    assert ended.returncode == EXIT_WATCHDOG
    assert "keepstep: stuck; ending this process (exit 70)" in ended.stderr
