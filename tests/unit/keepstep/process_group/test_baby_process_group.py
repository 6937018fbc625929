"""A process group in a child process that dies, freezes or sends garbage: an error on the next wait, never a hang."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore

from keepstep.process_group import (
    ProcessGroupAbortedError,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupError,
    ProcessGroupGloo,
)
from keepstep.process_group.baby import children
from keepstep.process_group.baby.children import Spawner
from keepstep.process_group.baby.operations import PackedCall
from tests.support.jobs.cohort import Cohort

LIMIT = timedelta(seconds=60)
SHORT = timedelta(seconds=1)


@pytest.fixture(scope="module", autouse=True)
def spawner() -> Iterator[None]:
    """Keep the spawner, whose start is slow, from test to test."""
    kept = Spawner.shared()
    kept.fork().discard()
    yield
    kept.release()


@pytest.fixture
def ranks(cohort: Callable[..., Cohort]) -> Cohort:
    return cohort(2, timeout=LIMIT, kind=ProcessGroupBabyGloo)


def all_reduced(group: Any, _: int) -> float:
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    return float(tensor[0])


def test_a_killed_child_fails_the_operation_in_flight_and_the_next_ones(ranks) -> None:
    victim, other = ranks.groups
    tensor = torch.ones(3)
    work = victim.allreduce([tensor])
    future = work.get_future()
    os.kill(victim.child_pid, signal.SIGKILL)
    with pytest.raises(ProcessGroupError, match="allreduce failed: the child process of the process group has ended"):
        work.wait()
    with pytest.raises(ProcessGroupError, match="has ended"):
        future.wait()
    with pytest.raises(ProcessGroupError, match="must be configured again"):
        victim.allreduce([tensor])
    with pytest.raises(ProcessGroupError, match="allreduce failed"):
        other.allreduce([torch.ones(3)]).wait()  # its connection with the killed process has ended
    assert victim.errored() is not None
    assert tensor.tolist() == [1, 1, 1]
    ranks.configure()
    assert ranks.each(all_reduced) == [2, 2]


def test_a_stopped_child_is_a_timeout_for_those_who_wait_and_for_futures(ranks) -> None:
    stopped, other = ranks.groups
    pid = stopped.child_pid
    for group in ranks.groups:
        group.set_timeout(SHORT)
    os.kill(pid, signal.SIGSTOP)
    tensor = torch.ones(3)
    waited, unwaited = stopped.allreduce([tensor]), other.allreduce([torch.ones(3)])
    with pytest.raises(TimeoutError, match=r"allreduce timed out after 1"):
        waited.wait()
    with pytest.raises((TimeoutError, ProcessGroupError)):
        unwaited.get_future().wait()
    assert tensor.tolist() == [1, 1, 1]
    ranks.configure()
    assert not Path(f"/proc/{pid}").exists()
    assert ranks.each(all_reduced) == [2, 2]


def test_a_stopped_child_fails_a_future_that_nobody_waits_for(ranks) -> None:
    stopped = ranks.groups[0]
    stopped.set_timeout(SHORT)
    os.kill(stopped.child_pid, signal.SIGSTOP)
    failed = threading.Event()
    stopped.allreduce([torch.ones(3)]).get_future().add_done_callback(lambda _: failed.set())
    assert failed.wait(30)
    assert isinstance(stopped.errored(), TimeoutError)


def test_an_abort_ends_operations_and_a_rendezvous_that_waits_for_a_peer(ranks) -> None:
    group = ranks.groups[0]
    work = group.allreduce([torch.ones(3)])
    group.abort("quorum 7 lost r1")
    with pytest.raises(ProcessGroupAbortedError, match="allreduce failed: quorum 7 lost r1"):
        work.wait()

    waits = threading.Event()

    class Announced(HashStore):
        def wait(self, keys: list[str], *_: Any) -> None:  # type: ignore[override]
            if not self.check(keys):
                waits.set()
            super().wait(keys, SHORT)  # it has no abort

        def get(self, key: str) -> bytes:
            self.wait([key])
            return super().get(key)

    def abort() -> None:
        waits.wait(30)
        group.abort("quorum 8 lost r1")

    aborting = threading.Thread(target=abort)
    aborting.start()
    before = set(threading.enumerate())
    with pytest.raises(ProcessGroupAbortedError, match="configure was aborted: quorum 8 lost r1"):
        group.configure("", "r0", 0, 2, 8, store=Announced())
    aborting.join()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)  # the server of the store still waits for a key, until that timeout


def test_a_spawner_that_did_not_answer_in_time_is_not_asked_again(monkeypatch) -> None:
    """Its late answer would name the child of another fork. Slow: the start of a spawner imports torch."""
    spawner = Spawner()
    spawner._users += 1
    try:
        child = spawner.fork()
        process = psutil.Process(child.pid).parent()
        child.discard()
        process.suspend()
        monkeypatch.setattr(children, "FORK_SECONDS", 0.1)
        with pytest.raises(ProcessGroupError, match="did not answer"):
            spawner.fork()
        process.resume()
        spawner._keeper.join(60)
        assert not spawner.alive
    finally:
        spawner.release()


def test_an_unconfigured_group_says_so() -> None:
    group = ProcessGroupBabyGloo()
    with pytest.raises(ProcessGroupError, match="call configure first"):
        group.allreduce([torch.ones(1)])
    assert (group.child_pid, group.errored(), group.size(), group.num_active_work()) == (None, None, 1, 0)
    with pytest.raises(ValueError, match="expected 0 <= rank < world_size"):
        group.configure("", "r0", 2, 2, store=HashStore())
    group.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without an accelerator")
def test_nccl_without_an_accelerator_names_the_remedy() -> None:
    with pytest.raises(ProcessGroupError, match=r"ProcessGroupBabyNCCL requires .* use ProcessGroupGloo"):
        ProcessGroupBabyNCCL()


def test_operations_in_flight_are_counted(ranks) -> None:
    first, second = ranks.groups
    work = first.allreduce([torch.ones(3)])
    assert first.num_active_work() == 1
    second.allreduce([torch.ones(3)]).wait()
    work.wait()
    assert first.num_active_work() == 0


def test_a_baby_and_a_plain_group_can_be_peers(cohort) -> None:
    kinds = iter([ProcessGroupBabyGloo, ProcessGroupGloo])
    mixed = cohort(2, timeout=LIMIT, kind=lambda limit: next(kinds)(timeout=limit))
    assert mixed.each(all_reduced) == [2, 2]


def usage() -> dict[str, int]:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return {
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "shared": len(os.listdir("/dev/shm")),  # noqa: PTH208
        "resident": resident,
    }


def test_an_operation_that_begins_while_the_group_is_aborted_fails(ranks, monkeypatch) -> None:
    group, _ = ranks.groups

    def packed(*arguments: Any) -> PackedCall:
        group.abort("the test aborts it")
        return PackedCall(*arguments)

    monkeypatch.setattr("keepstep.process_group.baby.child_connection.PackedCall", packed)
    with pytest.raises(ProcessGroupError, match="the test aborts it"):
        group.allreduce([torch.ones(3)]).wait(timedelta(seconds=5))


def test_sixty_reconfigurations_leave_nothing_behind(ranks) -> None:
    """Slow: 120 forks with a rendezvous each."""

    def again() -> dict[str, int]:
        ranks.configure()
        assert ranks.each(all_reduced) == [2, 2]
        return usage()

    for _ in range(10):
        first = again()
    for _ in range(50):
        last = again()
    assert last["resident"] - first["resident"] < 8_000_000
    del first["resident"], last["resident"]
    assert all(last[kind] <= first[kind] for kind in last), (first, last)  # fewer: one was about to close at first


PARENT = """
import signal, sys, os
import torch
from datetime import timedelta
from torch.distributed import HashStore
from keepstep.process_group import ProcessGroupBabyGloo
group = ProcessGroupBabyGloo(timedelta(seconds=60))
group.configure("", "r0", 0, 1, 1, store=HashStore())
if "stopped" in sys.argv:
    os.kill(group.child_pid, signal.SIGSTOP)
with open(f"/proc/{group.child_pid}/stat") as stat:
    print(group.child_pid, stat.read().split()[3], flush=True)
signal.pause()
"""


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_no_child_survives_a_killed_parent(state) -> None:
    """Slow: a new interpreter and its spawner both import torch."""
    with subprocess.Popen([sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        handles = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    try:
        for handle in handles:
            assert select.select([handle], [], [], 30)[0], "it still runs"
            with contextlib.suppress(ChildProcessError):  # the spawner ended after its child, and reaped it
                os.waitid(os.P_PIDFD, handle, os.WEXITED)  # this process inherits them: see tests/conftest.py
    finally:
        for handle in handles:
            os.close(handle)
    assert len(pids) == 2
