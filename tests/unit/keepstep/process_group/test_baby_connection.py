"""The messages, descriptors and tensors that go between a process group and its child process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from keepstep.futures import future_wait
from keepstep.process_group import ProcessGroupError
from keepstep.process_group.baby import channel as channel_module
from keepstep.process_group.baby.channel import Channel, ChannelError
from keepstep.process_group.baby.child_connection import Connection
from keepstep.process_group.baby.children import ChildProcess
from keepstep.process_group.baby.operations import PackedCall, UnpackedCall
from keepstep.process_group.baby.shared_memory import MAX_IDLE, SegmentPool, new_segment

LIMIT = timedelta(seconds=60)
SHORT = timedelta(seconds=1)


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


def test_an_answer_for_which_there_is_no_memory_fails_the_operation_at_once(scripted, monkeypatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    connection, theirs, process = scripted
    future = connection.run("allreduce", ([torch.ones(2)], dist.AllreduceOptions())).get_future()
    monkeypatch.setattr(PackedCall, "copy_results", no_memory)
    theirs.sendall(frame({"do": "done", "id": 0, "kind": None, "failed": False}))
    with pytest.raises(ProcessGroupError, match="answers of the child process cannot be read: MemoryError"):
        future_wait(future, timedelta(seconds=20))
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
def test_an_argument_that_cannot_go_to_a_child_is_named(args, reason) -> None:
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
