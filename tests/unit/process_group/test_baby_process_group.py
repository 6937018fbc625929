"""A process group in a child process that dies, freezes or sends garbage: an error on the next wait, never a hang."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from keepstep.process_group import (
    ProcessGroupAbortedError,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupError,
    ProcessGroupGloo,
)
from keepstep.process_group.baby import channel as channel_module
from keepstep.process_group.baby.channel import Channel, ChannelError
from keepstep.process_group.baby.children import ChildProcess, Spawner
from keepstep.process_group.baby.connection import Connection
from keepstep.process_group.baby.operations import PackedCall, UnpackedCall
from keepstep.process_group.baby.shared_memory import MAX_IDLE, SegmentPool, new_segment
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
    with pytest.raises(TimeoutError, match=r"allreduce took longer than 0:00:01"):
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
        def wait(self, *args: Any) -> None:  # type: ignore[override]
            waits.set()
            super().wait(*args)

        def get(self, key: str) -> bytes:
            waits.set()
            return super().get(key)

    def abort() -> None:
        waits.wait(30)
        group.abort("quorum 8 lost r1")

    aborting = threading.Thread(target=abort)
    aborting.start()
    store = Announced()
    store.set_timeout(SHORT)  # of this store: it has no abort
    with pytest.raises(ProcessGroupAbortedError, match="configure was aborted: quorum 8 lost r1"):
        group.configure("", "r0", 0, 2, 8, store=store)
    aborting.join()


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

    monkeypatch.setattr("keepstep.process_group.baby.connection.PackedCall", packed)
    with pytest.raises(ProcessGroupError, match="the test aborts it"):
        group.allreduce([torch.ones(3)]).wait(timedelta(seconds=5))


def test_two_hundred_reconfigurations_leave_nothing_behind(ranks) -> None:
    """Slow: 400 forks with a rendezvous each."""

    def again() -> dict[str, int]:
        ranks.configure()
        assert ranks.each(all_reduced) == [2, 2]
        return usage()

    for _ in range(10):
        first = again()
    for _ in range(190):
        last = again()
    assert last["resident"] - first["resident"] < 8_000_000
    del first["resident"], last["resident"]
    assert last == first


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


# ---- a child that breaks the protocol


@pytest.fixture
def scripted() -> Iterator[tuple[Connection, socket.socket, subprocess.Popen[bytes]]]:
    """A connection with a process whose messages the test writes."""
    process = subprocess.Popen(["/bin/sleep", "600"])
    ours, theirs = socket.socketpair()
    child = ChildProcess(Channel(ours), os.pidfd_open(process.pid), process.pid)
    store = HashStore()
    store.set_timeout(SHORT)  # it has no abort
    connection = Connection(child, store, LIMIT)
    yield connection, theirs, process
    connection.fail(ProcessGroupError("end of the test"))
    process.wait()
    connection.close()
    connection.close()  # nothing happens
    theirs.close()


def frame(message: Any, descriptors: int = 0) -> bytes:
    body = msgpack.packb([message, descriptors])
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\xff\xff\xff\xff", "frame too large: 4294967295 bytes"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "invalid message"),
        (frame("done"), "invalid message"),
        (frame({"do": "done"}), "invalid message"),
        (frame({"do": "done", "id": 99, "kind": None}), "answered operation 99"),
        (frame({"do": "done"}, descriptors=3), "3 descriptors announced, 0 received"),
        (frame({"do": "store", "method": "wait", "args": [["a"]]}) * 50, "called the store again"),
    ],
)
def test_a_child_that_breaks_the_protocol_is_killed(scripted, sent, reason) -> None:
    connection, theirs, process = scripted
    work = connection.run("allreduce", ([torch.ones(2)], dist.AllreduceOptions()))
    theirs.sendall(sent)
    with pytest.raises(ProcessGroupError, match=f"allreduce failed: the child process.*{reason}"):
        work.wait()
    assert process.wait(30) == -signal.SIGKILL


def test_a_child_that_floods_is_killed(scripted) -> None:
    connection, theirs, process = scripted
    work = connection.run("allreduce", ([torch.ones(2)], dist.AllreduceOptions()))
    theirs.setblocking(False)
    with contextlib.suppress(OSError):  # no process reads
        while True:
            theirs.sendall(frame({"do": "done", "id": 7, "kind": None}) * 100)
    with pytest.raises(ProcessGroupError, match="allreduce failed"):
        work.wait()
    assert process.wait(30) == -signal.SIGKILL


def test_a_child_that_does_not_read_is_killed(scripted, monkeypatch) -> None:
    monkeypatch.setattr(channel_module, "SEND_SECONDS", 0.1)
    connection, _, process = scripted

    def fill() -> None:
        while True:
            connection.run("barrier", (dist.BarrierOptions(),))

    with pytest.raises(ProcessGroupError, match=r"did not read for 0.1 s"):
        fill()
    assert process.wait(30) == -signal.SIGKILL
    assert connection.in_flight() == 0


def test_a_result_that_arrives_after_a_failure_is_not_copied(scripted) -> None:
    connection, theirs, _ = scripted
    tensor = torch.ones(2)
    connection.run("allreduce", ([tensor], dist.AllreduceOptions()))
    orders = Channel(theirs)
    (mapped, (descriptor,)) = orders.receive()
    os.close(descriptor)
    connection.fail(ProcessGroupError("lost"))
    theirs.sendall(frame({"do": "done", "id": 0, "kind": None, "failed": False}))
    connection._reader.join(30)
    assert mapped["do"] == "map"
    assert tensor.tolist() == [1, 1]


# ---- messages and memory


def test_a_channel_carries_messages_with_their_descriptors_in_order() -> None:
    left, right = (Channel(one) for one in socket.socketpair())
    reads, writes = os.pipe()
    left.send({"n": 1})
    left.send({"n": 2}, [writes])
    large = threading.Thread(target=left.send, args=({"n": 3, "body": b"x" * 1_000_000},))
    large.start()  # blocks until the other end reads
    assert right.receive() == ({"n": 1}, [])
    message, (copy,) = right.receive() or (None, [])
    os.write(copy, b"!")
    assert (message, os.read(reads, 1)) == ({"n": 2}, b"!")
    assert (right.receive() or ({}, []))[0]["n"] == 3
    large.join()
    with pytest.raises(TimeoutError):
        right.receive(0.0)
    with pytest.raises(ChannelError, match="message too large"):
        left.send(b"x" * (5 << 20))
    left.close()
    assert right.receive() is None
    with pytest.raises(OSError):
        right.send({"n": 4})
    right.close()
    for descriptor in (reads, writes, copy):
        os.close(descriptor)


def packed(operation: str, *args: Any) -> tuple[PackedCall, UnpackedCall]:
    descriptors: list[int] = []

    def take(size: int) -> Any:
        segment, descriptor = new_segment(size)
        descriptors.append(descriptor)
        return segment

    call = PackedCall(operation, args, take)
    for descriptor in descriptors:
        os.close(descriptor)
    return call, UnpackedCall(msgpack.unpackb(msgpack.packb(call.message)), call.segment)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        torch.tensor([1.5, -2], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.zeros(0, 3),
        torch.tensor(7.0),
        torch.zeros(4).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_tensor_arrives_and_its_result_comes_back(tensor) -> None:
    original = tensor.clone()
    call, received = packed("allreduce", [tensor], dist.AllreduceOptions())
    (arrived,) = received.args[0]
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert arrived.flatten().view(torch.uint8).tolist() == tensor.contiguous().flatten().view(torch.uint8).tolist()
    arrived.zero_()
    assert torch.equal(tensor.to(torch.complex64), original.to(torch.complex64))
    call.copy_results()
    assert not tensor.to(torch.complex64).any()


def test_options_arrive_with_all_their_values() -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 3, 1, timedelta(seconds=7)
    _, received = packed("broadcast", [torch.ones(1)], options)
    arrived = received.args[1]
    assert (arrived.rootRank, arrived.rootTensor, arrived.timeout) == (3, 1, timedelta(seconds=7))
    reduce = dist.ReduceScatterOptions()
    reduce.reduceOp = dist.ReduceOp.MAX
    _, received = packed("reduce_scatter", [torch.ones(1)], [[torch.ones(1)]], reduce)
    assert received.args[2].reduceOp == dist.ReduceOp.MAX


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (([torch.ones(2).to_sparse()],), "layout torch.sparse_coo"),
        (([torch.ones(2)], object()), "invalid argument of type object"),
    ],
)
def test_what_cannot_go_to_a_child_is_named(args, reason) -> None:
    with pytest.raises(TypeError, match=reason):
        packed("allreduce", *args)


def test_a_pool_reuses_segments_and_keeps_few() -> None:
    pool = SegmentPool()
    segments = []
    for size in range(1, MAX_IDLE + 2):
        segment, descriptor = new_segment(size << 20)
        os.close(descriptor)
        segments.append(segment)
    dropped = [one for segment in segments for one in pool.give_back(segment)]
    assert dropped == segments[:1]
    assert pool.take(2 << 20) is segments[1]
    assert pool.take(1) is None  # every idle segment is much larger
    with pytest.raises(ValueError, match="outside of its segment"):
        segments[0].tensor(segments[0].size - 4, torch.float32, (2,))
