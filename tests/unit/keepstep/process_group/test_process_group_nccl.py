"""NCCL on the GPU of this machine: one rank, since two cannot share a device."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from keepstep.process_group import ProcessGroupAbortedError, ProcessGroupError, ProcessGroupNCCL, ProcessGroupXCCL
from keepstep.rendezvous.store_client import KeyValueServer, RendezvousStore, Table

on_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and a torch with NCCL"
)


class Alone:
    """A rank with its rendezvous."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        self.server = KeyValueServer()
        self.group = ProcessGroupNCCL(timeout)
        self.quorum = 0

    def configure(self, world_size: int = 1) -> None:
        self.quorum += 1
        table = Table(quorum_id=self.quorum)
        store = RendezvousStore("http://127.0.0.1:1", table, server=self.server)
        self.group.configure("", "r0", 0, world_size, self.quorum, store=store)


@pytest.fixture
def alone():
    made = []

    def make(timeout: timedelta = timedelta(seconds=60)) -> Alone:
        made.append(Alone(timeout))
        return made[-1]

    yield make
    for one in made:
        one.group.shutdown()
        one.server.close()


def test_without_a_gpu_nccl_says_what_to_use_instead() -> None:
    kinds = [ProcessGroupXCCL] if dist.is_nccl_available() and torch.cuda.is_available() else [ProcessGroupNCCL]
    for kind in kinds:
        with pytest.raises(ProcessGroupError, match="use ProcessGroupGloo"):
            kind()


@on_gpu
def test_collectives_on_one_rank(alone) -> None:
    one = alone()
    one.configure()
    value = torch.arange(6.0, device="cuda").reshape(2, 3)
    reduced, gathered, scattered, exchanged = (value.clone() for _ in range(4))
    one.group.allreduce([reduced]).wait()
    one.group.allreduce_coalesced([reduced]).wait()
    one.group.allgather_into_tensor_coalesced([gathered.zero_()], [value]).wait()
    one.group.reduce_scatter_tensor_coalesced([scattered.zero_()], [value]).wait()
    one.group.alltoall_base(exchanged.zero_(), value, [], []).wait()
    one.group.broadcast_one(value, 0).wait()
    one.group.barrier().wait()
    listed = [torch.zeros_like(value)]
    one.group.allgather([listed], [value]).wait()
    for result in (reduced, gathered, scattered, exchanged, listed[0]):
        torch.testing.assert_close(result, value)
    (result,) = one.group.allreduce([reduced]).get_future().wait()
    torch.testing.assert_close(result, value)
    assert one.group.errored() is None


@on_gpu
def test_reconfigured_after_aborts_it_works_and_leaks_no_threads(alone) -> None:
    one = alone()
    counts = []
    for _ in range(20):
        one.configure()
        tensor = torch.ones(8, device="cuda")
        one.group.allreduce([tensor]).wait()
        assert one.group.errored() is None
        one.group.abort("injected")
        assert isinstance(one.group.errored(), ProcessGroupAbortedError)
        with pytest.raises(ProcessGroupError, match="injected"):
            one.group.allreduce([tensor])
        counts.append(threading.active_count())
    assert counts[-1] <= counts[4] + 2


@on_gpu
def test_a_stream_that_stands_still_aborts_the_group(alone) -> None:
    one = alone(timedelta(seconds=0.5))
    one.configure()
    tensor = torch.ones(8, device="cuda")
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    one.group.allreduce([tensor]).wait()
    assert isinstance(one.group.errored(), TimeoutError)


@on_gpu
def test_a_future_whose_operation_stands_still_aborts_the_group_though_no_other_stream_waits_for_it(alone) -> None:
    one = alone(timedelta(seconds=0.5))
    one.configure()
    tensor = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(8_000_000_000)  # about four seconds, of that stream and of what the operation waits for
        work = one.group.allreduce([tensor])
    future = work.get_future()
    deadline = time.monotonic() + 5
    while one.group.errored() is None and time.monotonic() < deadline:
        time.sleep(0.05)  # asking is all that a caller can do
    assert isinstance(one.group.errored(), TimeoutError)
    future.wait()


@on_gpu
def test_a_future_holds_the_value_that_its_operation_leaves(alone) -> None:
    one = alone()
    one.configure()
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(1)
        future = one.group.allreduce([tensor]).get_future()
    (result,) = future.wait()  # makes the current stream wait
    assert bool((result.clone() == 1).all())
    assert one.group.errored() is None


@on_gpu
def test_abort_frees_a_configure_that_waits_for_a_peer(alone) -> None:
    one = alone(timedelta(minutes=5))
    errors = []

    def configure() -> None:
        try:
            one.configure(world_size=2)
        except ProcessGroupAbortedError as error:
            errors.append(error)

    thread = threading.Thread(target=configure)
    thread.start()
    thread.join(2)  # by then it waits for the others, in C++, without an event
    assert thread.is_alive()
    begun = time.monotonic()
    one.group.abort("r1 was lost")
    thread.join(60)
    assert time.monotonic() - begun < 5
    assert "r1 was lost" in str(errors[0])
