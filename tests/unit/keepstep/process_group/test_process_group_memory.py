"""A trainer that gets no more memory in a collective: the collective or the trainer ends, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from keepstep.futures import future_wait
from keepstep.process_group import ProcessGroupError
from keepstep.process_group.torch_backends.backend_work import BackendWork
from keepstep.process_group.torch_backends.communicator import Communicator
from keepstep.process_group.torch_backends.gloo import GlooCommunicator
from keepstep_mesh.exit_codes import EXIT_WATCHDOG

SOON = timedelta(seconds=20)
"""Much less than the timeout of an operation here."""

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


DROPPED = """
import resource, threading, torch
from datetime import timedelta
from torch.distributed import HashStore
from keepstep.futures import future_wait
from keepstep.process_group import ProcessGroupGloo
store, minute = HashStore(), timedelta(minutes=1)
groups = [ProcessGroupGloo(minute) for _ in range(2)]
def configure(rank):
    groups[rank].configure("", f"r{rank}", rank, 2, 1, store=store)
threads = [threading.Thread(target=configure, args=(rank,)) for rank in range(2)]
for one in threads: one.start()
for one in threads: one.join()
for _ in range(30):  # all threads of Gloo get their own memory
    for work in [group.allreduce([torch.ones(9)]) for group in groups]: work.get_future().wait()
late = [torch.ones(9)]
future = groups[0].allreduce([torch.ones(9)]).get_future()
resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
groups[1].allreduce(late)
result = future_wait(future, timedelta(seconds=20))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(result[0].tolist())
"""


def test_the_result_of_a_collective_arrives_although_its_callback_gets_no_memory():
    ended = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "MemoryError" in ended.stderr, "the callback had memory"
    assert ended.stdout == f"{[2.0] * 9}\n"


def no_memory(*_: object) -> None:
    raise MemoryError


def test_a_peer_watch_without_memory_fails_the_futures_that_it_watches(cohort, monkeypatch):
    groups = cohort(2).groups
    monkeypatch.setattr(GlooCommunicator, "has_lost_a_peer", no_memory)
    monkeypatch.setattr("keepstep.process_group.torch_backends.communicator.STALL", 0)
    with pytest.raises(ProcessGroupError, match="allreduce failed: MemoryError"):
        future_wait(groups[0].allreduce([torch.zeros(9)]).get_future(), SOON)


def test_a_result_arrives_although_its_callback_fails_and_only_the_future_is_kept(cohort, monkeypatch):
    first, second = cohort(2).groups
    monkeypatch.setattr(BackendWork, "_arrived", no_memory)
    future = first.allreduce([torch.ones(9)]).get_future()
    second.allreduce([torch.ones(9)]).wait()
    assert future_wait(future, SOON)[0].tolist() == [2.0] * 9


class OutOfMemory(Work):
    """An operation whose backend gets no memory: torch raises the type of std::bad_alloc."""

    def wait(self, timeout: timedelta = SOON) -> bool:  # noqa: ARG002
        raise MemoryError

    def get_future(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(MemoryError())
        return future

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("way", ["wait", "future"])
def test_a_backend_without_memory_breaks_the_group_at_once(cohort, monkeypatch, way):
    groups = cohort(2).groups
    monkeypatch.setattr(Communicator, "start", lambda *_: OutOfMemory())
    work = groups[0].allreduce([torch.zeros(9)])
    with pytest.raises(ProcessGroupError, match="allreduce failed and aborted the process group: MemoryError"):
        work.wait() if way == "wait" else future_wait(work.get_future(), SOON)
    assert isinstance(groups[0].errored(), ProcessGroupError)


PLANTED = """
from datetime import timedelta
from torch.futures import Future
from keepstep.futures import context_timeout, future_wait
from keepstep.process_group import ProcessGroupGloo
from keepstep.process_group.torch_backends.gloo import GlooCommunicator
from keepstep.process_group.works import PendingWork
from torch.distributed import HashStore
def no_memory(*_, **__):
    raise MemoryError
{fault}
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            """
GlooCommunicator._shut_down = no_memory
group = ProcessGroupGloo(timedelta(minutes=1))
group.configure("", "r0", 0, 1, 1, store=HashStore())
group.abort()
""",
            "the abort of a process group failed: MemoryError()",
        ),
        (
            """
class Stingy(Future):
    set_result = no_memory
work = PendingWork([])
work._future = Stingy()
work._end(None)
""",
            "the completion of a future failed: MemoryError()",
        ),
        (
            """
with context_timeout(no_memory, timedelta(0)):
    future_wait(Future(), timedelta(minutes=1))
""",
            "the thread that watches deadlines failed",
        ),
    ],
    ids=["abort", "future", "deadline"],
)
def test_a_trainer_ends_at_once_if_others_would_wait_for_what_it_has_no_memory_for(fault, reason):
    program = [sys.executable, "-c", PLANTED.format(fault=fault)]
    ended = subprocess.run(program, stderr=subprocess.PIPE, text=True, timeout=40, check=False)
    assert ended.returncode == EXIT_WATCHDOG, ended.stderr
    assert f"{reason}; ending this process (exit 70)" in ended.stderr
