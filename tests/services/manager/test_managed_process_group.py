"""A registered ``ManagedProcessGroup``: torch's functional collectives over the groups of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # the first functional collective imports it, while its peer waits
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional

from keepstep import ManagedProcessGroup, ProcessGroupDummy
from keepstep.process_group import FakeProcessGroupWrapper, ProcessGroupError
from tests.services.manager.groups import manager, together


@pytest.fixture
def world() -> Iterator[None]:
    """``torch.distributed`` for this process alone, as under torchrun with one rank in each group."""
    dist.Backend.register_backend("managed-world", lambda *_: ProcessGroupDummy(), devices=["cpu"])
    dist.init_process_group("managed-world", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_functional_reductions_go_through_the_manager(world, lighthouse) -> None:
    ready = threading.Barrier(2)

    def functions(name: str) -> list[Any]:
        with manager(lighthouse, name, min_replica_size=2) as m:
            group = ManagedProcessGroup(m).register("managed")
            ready.wait(30)
            m.start_quorum()
            results = [
                (functional.all_reduce(torch.tensor(1.5), "sum", group) + 0).item(),
                (functional.all_reduce(torch.tensor(1.5), "avg", group) + 0).item(),
                (functional.all_reduce(torch.tensor(1.5), "max", group) + 0).item(),
                (functional.all_reduce(torch.tensor(7), "sum", group) + 0).item(),
                (functional.all_reduce(torch.tensor(7), "max", group) + 0).item(),
                group.size(),
                m.should_commit(),
            ]
            ready.wait(30)
            group.unregister()
            return results

    def methods(name: str) -> list[Any]:
        with manager(lighthouse, name, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            results: list[Any] = []
            for value, op in [
                (4.5, ReduceOp.SUM),
                (4.5, ReduceOp.AVG),
                (4.5, ReduceOp.MAX),
                (2, ReduceOp.SUM),
                (2, ReduceOp.MAX),
            ]:
                tensor = torch.tensor(value)
                assert m.allreduce(tensor, reduce_op=op).wait()
                results.append(tensor.item())
            results += [m.num_participants(), m.should_commit()]
            ready.wait(30)
            return results

    assert together(lambda: functions("a"), lambda: methods("b")) == [[6.0, 3.0, 4.5, 9, 7, 2, True]] * 2


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp(ReduceOp.MAX)], ids=["name", "object"])  # torch passes both
def test_a_group_that_heals_does_not_change_a_maximum(lighthouse, op) -> None:
    """The joiner contributes the neutral element: the maximum of the others, which are all negative, stays."""
    joined, left = threading.Event(), threading.Event()

    def first() -> set[tuple[float, int]]:
        seen = set()
        with manager(lighthouse, "a", {"w": torch.zeros(1)}) as m:
            while not left.is_set():
                m.start_quorum()
                tensor = torch.tensor([-3.0])
                if m.allreduce(tensor, reduce_op=op).wait():
                    seen.add((tensor.item(), m.num_participants()))
                if m.should_commit() and m.current_step() > 3:
                    joined.set()
        return seen

    def second() -> list[float]:
        joined.wait(30)
        results = []
        with manager(lighthouse, "b", {"w": torch.ones(1)}) as m:
            for _ in range(2):
                m.start_quorum()
                tensor = torch.tensor([-5.0])
                m.allreduce(tensor, reduce_op=op).wait()
                m.should_commit()
                results.append(tensor.item())
        left.set()
        return results

    seen, results = together(first, second)
    assert {value for value, _ in seen} == {-3.0}
    assert results == [-3.0, -3.0]


def test_small_values_are_gathered_and_broadcast_bit_for_bit_over_the_groups(lighthouse) -> None:
    ready = threading.Barrier(3)
    values = [torch.tensor([1.5 + rank, float("nan")]) for rank in range(3)]

    def group(number: int) -> None:
        with manager(lighthouse, f"r{number}", min_replica_size=3) as m:
            ready.wait(30)
            m.start_quorum()
            managed = ManagedProcessGroup(m)
            outputs = [torch.empty(2) for _ in range(3)]
            assert managed.allgather([outputs], [values[number]]).wait()
            flags = [torch.empty((), dtype=torch.bool) for _ in range(3)]
            managed.allgather([flags], [torch.tensor(number == 1)]).get_future().wait()
            flat = torch.empty(6, dtype=torch.complex128)
            assert managed.allgather_into_tensor_coalesced([flat], [torch.full_like(flat[:2], 1j * number)]).wait()
            chosen = torch.tensor([number], dtype=torch.bfloat16)
            assert managed.broadcast_one(chosen, 2).wait()
            assert managed.barrier().wait()
            with pytest.raises(ProcessGroupError, match="2 outputs for the tensors of size"):
                managed.allgather([outputs[:2]], [values[number]])
            with pytest.raises(ProcessGroupError, match="invalid root 3"):
                managed.broadcast_one(chosen, 3)
            with pytest.raises(ProcessGroupError, match="does not support alltoall_base"):
                managed.alltoall_base(torch.empty(3), torch.empty(3), [], [])
            assert m.should_commit()
            ready.wait(30)
            assert torch.stack(outputs).view(torch.int32).equal(torch.stack(values).view(torch.int32))
            assert [one.item() for one in flags] == [False, True, False]
            assert flat.tolist() == [0, 0, 1j, 1j, 2j, 2j]
            assert chosen.item() == 2

    together(*(lambda number=number: group(number) for number in range(3)))


class OnAnAccelerator(ProcessGroupDummy):
    """A group that takes tensors of one device, as NCCL does. This machine may have no accelerator: "meta" is there."""

    device = torch.device("meta")

    def _run(self, operation: str, *args: Any) -> dist.Work:
        if any(not one.is_meta for one in args[0]):
            raise RuntimeError(f"No backend type associated with device type {args[0][0].device}")
        return super()._run(operation, *args)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_barrier_reduces_on_the_device_of_the_process_group(lighthouse, wrapped) -> None:
    pg = OnAnAccelerator()
    with manager(lighthouse, "a", pg=FakeProcessGroupWrapper(pg) if wrapped else pg) as m:
        m.start_quorum()
        managed = ManagedProcessGroup(m)
        assert managed.device == torch.device("meta")
        assert managed.barrier().wait()
        assert m.should_commit()


def test_a_gather_of_a_failed_step_leaves_its_outputs_and_does_not_raise(lighthouse) -> None:
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        m.report_error(RuntimeError("of the script"))
        outputs = [torch.full((2,), 7.0)]
        assert not ManagedProcessGroup(m).allgather([outputs], [torch.ones(2)]).wait()
        assert outputs[0].tolist() == [7, 7]
        assert not m.should_commit()
