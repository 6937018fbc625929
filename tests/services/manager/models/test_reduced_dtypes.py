"""All-reduces of dtypes whose sum over the groups is not simply a sum."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from keepstep import DistributedDataParallel, Manager
from tests.services.manager.groups import manager, together


def reduced(lighthouse: str, tensors: dict[str, torch.Tensor], op: Any = ReduceOp.AVG) -> list[torch.Tensor]:
    """Return the tensor of each group after an all-reduce of it."""
    ready = threading.Barrier(len(tensors))

    def group(name: str) -> torch.Tensor:
        with manager(lighthouse, name, min_replica_size=len(tensors), init_sync=False) as m:
            ready.wait(30)
            m.start_quorum()
            tensor = tensors[name].clone()
            assert m.allreduce(tensor, reduce_op=op).wait(), m.errored()
            ready.wait(30)
            assert m.should_commit()
            return tensor

    return together(*(lambda name=name: group(name) for name in tensors))


@pytest.mark.parametrize("groups", ["ab", "abc", "abcd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_average_of_large_values_does_not_overflow(lighthouse, groups, dtype):
    large = 60000.0 if dtype is torch.float16 else 2.0**127
    tensors = {name: torch.full((5,), large, dtype=dtype) for name in groups}
    for result in reduced(lighthouse, tensors):
        assert result.tolist() == [large] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_average_of_other_floats_is_divided_after_the_sum(lighthouse, dtype):
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # half of it is zero
    tensors = {name: torch.full((2,), tiny, dtype=dtype) for name in "ab"}
    for result in reduced(lighthouse, tensors):
        assert result.tolist() == [tiny] * 2


def test_large_half_precision_gradients_are_averaged_by_ddp(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str) -> list[float]:
        model = nn.Linear(2, 1, bias=False).half()
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = DistributedDataParallel(m, model)
            ready.wait(30)
            m.start_quorum()
            ddp(torch.full((1, 2), 50000.0 if name == "a" else 60000.0).half()).sum().backward()
            assert m.should_commit()
            ready.wait(30)
            return model.weight.grad.flatten().tolist()

    assert together(lambda: group("a"), lambda: group("b")) == [[54976.0] * 2] * 2


A = torch.tensor([True, True, False, False])
B = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    ("op", "expected"),
    [(ReduceOp.SUM, A | B), (ReduceOp.MAX, A | B), (ReduceOp.MIN, A & B), (ReduceOp.PRODUCT, A & B)],
    ids=["SUM", "MAX", "MIN", "PRODUCT"],
)
def test_booleans_stay_booleans(lighthouse, op, expected):
    for result in reduced(lighthouse, {"a": A, "b": B}, op):
        assert result.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


def test_a_sum_of_booleans_does_not_wrap_around(lighthouse):
    """Each True adds nothing to another: as bytes, 256 of them would be False."""
    for result in reduced(lighthouse, {name: torch.ones(3, dtype=torch.bool) for name in "abc"}, ReduceOp.SUM):
        assert result.view(torch.uint8).tolist() == [1] * 3


def test_booleans_have_no_average(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        with pytest.raises(ValueError, match=r"average of torch.bool.*ReduceOp.SUM"):
            m.allreduce(torch.ones(3, dtype=torch.bool))
        assert isinstance(m, Manager)
        assert m.should_commit(), "a call that was refused is no part of the step"
