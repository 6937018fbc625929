"""The contribution of a group that does not take part leaves every reduction unchanged."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

from keepstep.step.reducing.neutral_elements import neutral_element

REDUCE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
BITWISE = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("op", REDUCE, ids=str)
def test_a_reduction_with_the_neutral_element_changes_nothing(op, dtype) -> None:
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    values = torch.tensor([limits.min, 0, 1, 3, limits.max], dtype=dtype)
    neutral = torch.empty_like(values).fill_(neutral_element(op, dtype))
    assert torch.equal(REDUCE[op](values, neutral), values)


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS], ids=str)
@pytest.mark.parametrize("op", BITWISE, ids=str)
def test_a_bitwise_reduction_with_the_neutral_element_changes_nothing(op, dtype) -> None:
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    neutral = torch.empty_like(values).fill_(neutral_element(op, dtype))
    assert torch.equal(BITWISE[op](values, neutral), values)


@pytest.mark.parametrize(("op", "neutral"), [(ReduceOp.MIN, True), (ReduceOp.MAX, False)])
def test_booleans_have_an_order(op, neutral) -> None:
    assert neutral_element(op, torch.bool) is neutral


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN])
def test_an_operation_without_a_neutral_element_is_refused(op) -> None:
    with pytest.raises(ValueError, match=r"on torch.complex64 has no neutral element"):
        neutral_element(op, torch.complex64)
