"""A trainer that gets no more memory in the middle of a collective: it ends, and does not hang with its locks held."""

from __future__ import annotations

import subprocess
import sys

from keepstep_mesh.exit_codes import EXIT_WATCHDOG

PROGRAM = """
import resource, threading, torch
from datetime import timedelta
from torch.distributed import HashStore
from keepstep.process_group import ProcessGroupGloo
from keepstep_mesh.threads import starting
starting.THREAD_START_SECONDS = 0.5
store, minute = HashStore(), timedelta(minutes=1)
groups = [ProcessGroupGloo(minute) for _ in range(2)]
all_run = threading.Barrier(8)
def configure(rank):
    if rank < 2:
        groups[rank].configure("", f"r{rank}", rank, 2, 1, store=store)
    all_run.wait()
threads = [threading.Thread(target=configure, args=(rank,)) for rank in range(8)]
for one in threads: one.start()
for one in threads: one.join()  # glibc keeps their stacks for further threads: these start, and find no memory then
work = groups[0].allreduce([torch.zeros(9)])  # without its peer
resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
work.get_future()
"""


def test_a_trainer_ends_when_a_thread_gets_no_memory_to_start():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_WATCHDOG, ended.stderr
    assert "the start of thread 'keepstep-peer-watch'" in ended.stderr
    assert "stuck for 0.5 s; ending this process (exit 70)" in ended.stderr
