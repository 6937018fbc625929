"""The groups around and in place of others, and what torch does with a registered one."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from keepstep.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from keepstep.process_group.works import CompletedWork, JointWork
from tests.support.models.manager_double import ManagerDouble

VALUE = torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def world() -> Iterator[None]:
    """``torch.distributed`` initialised for this process alone, as a group of one under torchrun is.

    Not with torch's Gloo: a functional collective makes torch keep the world, sockets and all.
    """
    dist.Backend.register_backend("world-of-one", lambda *_: ProcessGroupDummy(), devices=["cpu"])
    dist.init_process_group("world-of-one", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- dummy


def test_a_dummy_group_does_what_a_group_of_one_does() -> None:
    group = ProcessGroupDummy(0, 1)
    group.configure("nowhere:1/x", "r0", 0, 1)
    assert (group.rank(), group.size()) == (0, 1)
    tensor = VALUE.clone()
    for work in (
        group.allreduce([tensor]),
        group.allreduce_coalesced([tensor]),
        group.broadcast_one(tensor, 0),
        group.barrier(),
    ):
        assert work.wait()
    torch.testing.assert_close(tensor, VALUE)
    outputs = [torch.zeros(3) for _ in range(7)]
    group.allgather([[outputs[0]]], [VALUE]).wait()
    group.reduce_scatter([outputs[1]], [[VALUE]]).wait()
    group.allgather_into_tensor_coalesced([outputs[2]], [VALUE]).wait()
    group.reduce_scatter_tensor_coalesced([outputs[3]], [VALUE]).wait()
    group.alltoall_base(outputs[4], VALUE, [], []).wait()
    group._allgather_base(outputs[5], VALUE).wait()
    group._reduce_scatter_base(outputs[6], VALUE).wait()
    for output in outputs:
        torch.testing.assert_close(output, VALUE)
    assert group.allreduce([tensor]).get_future().wait() == [tensor]
    assert group.errored() is None


def test_a_dummy_group_has_no_peer_to_send_to() -> None:
    with pytest.raises(ProcessGroupError, match="needs a peer"):
        ProcessGroupDummy().send([VALUE.clone()], 0, 0)


def test_a_dummy_group_is_of_one() -> None:
    with pytest.raises(ValueError, match="rank 0 of 1"):
        ProcessGroupDummy(0, 2)


# ---- wrappers


def test_a_wrapper_hands_everything_to_its_group(cohort) -> None:
    ranks = cohort(2)
    wrapped = ProcessGroupWrapper(ranks.groups[0])
    assert (wrapped.rank(), wrapped.size(), wrapped.getBackendName()) == (0, 2, "keepstep-gloo")
    assert wrapped.parent is ranks.groups[0]

    def run(group, rank):
        tensor = VALUE.clone()
        (wrapped if rank == 0 else group).allreduce([tensor]).wait()
        return tensor

    for result in ranks.each(run):
        torch.testing.assert_close(result, 2 * VALUE)
    wrapped.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError):
        wrapped.barrier().wait()
    assert isinstance(wrapped.errored(), TimeoutError)
    wrapped.shutdown()
    with pytest.raises(ProcessGroupError, match="not configured"):
        wrapped.barrier()


def test_swallowed_errors_are_kept_and_later_operations_do_nothing(cohort) -> None:
    ranks = cohort(2)
    group = ErrorSwallowingProcessGroupWrapper(ranks.groups[0])
    tensor = VALUE.clone()
    work = group.allreduce([tensor])
    future = group.allreduce([tensor]).get_future()
    ranks.groups[1].abort("injected")
    assert work.wait() is False
    assert future.wait() == [tensor]
    error = group.error()
    assert isinstance(error, ProcessGroupError)
    assert group.errored() is error
    untouched = VALUE.clone()
    assert group.allreduce([untouched]).wait()
    torch.testing.assert_close(untouched, VALUE)


def test_errors_at_issue_are_swallowed_too() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo())
    assert group.allreduce([VALUE.clone()]).wait()
    assert "not configured" in str(group.error())


def test_configure_forgets_swallowed_errors() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupDummy())
    group.report_error(RuntimeError("injected"))
    group.report_error(RuntimeError("later"))
    assert str(group.error()) == "injected"
    group.configure("x:1/y", "r0", 0, 1)
    assert group.error() is None


def test_an_injected_error_fails_the_next_operation_only() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.report_future_error(RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        group.allreduce([VALUE.clone()]).wait()
    assert group.allreduce([VALUE.clone()]).wait()
    group.report_future_error(RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        group.allreduce([VALUE.clone()]).get_future().wait()
    group.report_future_error(RuntimeError("forgotten"))
    group.configure("x:1/y", "r0", 0, 1)
    assert group.barrier().wait()


def test_a_swallowing_wrapper_takes_the_errors_of_the_wrapper_in_it() -> None:
    faulty = FakeProcessGroupWrapper(ProcessGroupDummy())
    group = ErrorSwallowingProcessGroupWrapper(faulty)
    faulty.report_future_error(RuntimeError("injected"))
    assert group.allreduce([VALUE.clone()]).wait() is False
    assert str(group.error()) == "injected"


# ---- managed


class Doubling(ManagerDouble):
    """A Manager of two equal groups."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[ReduceOp] = []

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: ReduceOp) -> Work:
        self.operations.append(reduce_op)
        tensor.mul_(2)
        return CompletedWork(tensor)

    def num_participants(self) -> int:
        return 2


def test_a_managed_group_reduces_through_the_manager_and_has_its_size() -> None:
    manager = Doubling()
    group = ManagedProcessGroup(manager)
    assert group.size() == 2
    tensors = [VALUE.clone(), VALUE.clone()]
    assert group.allreduce([tensors[0]], ReduceOp.AVG).wait()
    assert group.allreduce_coalesced(tensors).wait()
    torch.testing.assert_close(tensors[0], 4 * VALUE)
    torch.testing.assert_close(tensors[1], 2 * VALUE)
    assert manager.operations == [ReduceOp.AVG, ReduceOp.SUM, ReduceOp.SUM]
    assert group.allreduce_coalesced(tensors).get_future().wait() == tensors


def test_a_managed_group_refuses_what_the_manager_would_not_know_of() -> None:
    with pytest.raises(ProcessGroupError, match="ManagedProcessGroup does not support alltoall_base"):
        ManagedProcessGroup(Doubling()).alltoall_base(VALUE, VALUE, [], [])


# ---- registered with torch.distributed


def test_functional_collectives_work_on_a_registered_group(world, cohort) -> None:
    ranks = cohort(2)
    group = ranks.groups[0].register("replicas")
    assert group is ranks.groups[0]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def other(operation, *args):
            return pool.submit(lambda: getattr(ranks.groups[1], operation)(*args).wait())

        peer = other("allreduce", [VALUE.clone()])
        torch.testing.assert_close(functional.all_reduce(VALUE, "sum", group) + 0, 2 * VALUE)
        peer.result(30)
        peer = other("broadcast_one", VALUE * 5, 1)
        tensor = torch.zeros(3)
        dist.broadcast(tensor, group_src=1, group=group)
        torch.testing.assert_close(tensor, 5 * VALUE)
        peer.result(30)
    group.unregister()


@pytest.mark.parametrize("kind", [ProcessGroupGloo, ProcessGroupBabyGloo])
def test_functional_reductions_work_on_scalars_of_floats_and_integers(world, cohort, kind) -> None:
    ranks = cohort(2, kind=kind)
    group = ranks.groups[0].register(kind.__name__)
    inputs = {torch.float32: (1.5, 4.0), torch.int64: (-3, 8)}
    expected = {
        "sum": {torch.float32: 5.5, torch.int64: 5},
        "avg": {torch.float32: 2.75, torch.int64: 2},
        "max": {torch.float32: 4.0, torch.int64: 8},
    }
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for name, results in expected.items():
            operation = getattr(ReduceOp, name.upper())
            for dtype, result in results.items():
                ours, theirs = (torch.tensor(value, dtype=dtype) for value in inputs[dtype])
                peer = pool.submit(lambda t=theirs, op=operation: ranks.groups[1].allreduce([t], op).wait())
                reduced = functional.all_reduce(ours, name, group) + 0
                peer.result(30)
                assert (name, reduced.item(), reduced.dtype, theirs.item()) == (name, result, dtype, result)
    group.unregister()


def test_an_average_over_gloo_is_complete_in_its_future_and_in_wait(cohort) -> None:
    ranks = cohort(2)

    def run(group, rank):
        first, second, shared = torch.full((2,), rank + 1.0), torch.full((2,), rank + 1.0), torch.zeros(1)
        assert group.allreduce([first], ReduceOp.AVG).get_future().wait()[0].tolist() == [1.5, 1.5]
        work = group.allreduce([second], ReduceOp.AVG)
        assert work.wait()
        assert work.wait()  # a second wait does not divide again
        group._reduce_scatter_base(shared, torch.tensor([2.0, 4.0]) * (rank + 1), ReduceOp.AVG).wait()
        return first.tolist(), second.tolist(), shared.item()

    assert ranks.each(run) == [([1.5, 1.5], [1.5, 1.5], 3.0), ([1.5, 1.5], [1.5, 1.5], 6.0)]


def test_a_device_mesh_takes_a_registered_group(world) -> None:
    group = ManagedProcessGroup(Doubling()).register("mesh")
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.testing.assert_close(functional.all_reduce(VALUE, "sum", mesh) + 0, 2 * VALUE)
    assert mesh.get_group() is group
    group.unregister()


def test_a_group_may_be_registered_again_after_it_was_taken_back(world) -> None:
    group = ProcessGroupDummy()
    for _ in range(2):
        assert group.register("again") is group
        torch.testing.assert_close(functional.all_reduce(VALUE, "sum", group) + 0, VALUE)
        group.unregister()


def test_errors_surface_through_torchs_functional_collectives(world) -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.register("faulty")
    group.report_future_error(RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        dist.all_reduce(VALUE.clone(), group=group)
    group.unregister()


def test_of_several_works_each_is_waited_for_although_the_first_fails():
    class Slow(CompletedWork):
        over = False

        def wait(self, timeout=timedelta(0)):
            self.over = True
            return super().wait(timeout)

    failing = FakeProcessGroupWrapper(ProcessGroupDummy())
    failing.report_future_error(TimeoutError("a peer is stuck"))
    slow = Slow([])
    with pytest.raises(TimeoutError, match="a peer is stuck"):
        JointWork([failing.allreduce([torch.ones(1)]), slow], []).wait()
    assert slow.over
