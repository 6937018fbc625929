"""The 8-bit format of rows, and the fused functions on it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from keepstep.quantization import fused_dequantize_from_fp8, fused_quantize_into_fp8, fused_reduce_fp8
from keepstep.quantization.row_format import FP8, INT8, ROW, RowFormat

FORMATS = pytest.mark.parametrize("row_format", [INT8, FP8], ids=["int8", "fp8"])
HALF_STEP = {"int8": 0.5 / 127, "fp8": 2**-4}
"""Largest error of an element: of int8 relative to the largest element of the row, of fp8 relative to itself."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def through(row_format: RowFormat, rows: torch.Tensor) -> torch.Tensor:
    """Return rows that were encoded and decoded."""
    piece = torch.empty(row_format.piece_bytes(rows.shape[0]), dtype=torch.uint8)
    parts = row_format.parts(piece, rows.shape[0])
    row_format.encode(rows, *parts)
    decoded = torch.empty_like(rows)
    row_format.decode(*parts, decoded)
    return decoded


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1.0, 1e4, 1e30])
def test_an_element_is_as_close_as_the_format_allows(row_format, dtype, magnitude):
    if magnitude not in (1.0, 1e4) and dtype is torch.float16:
        return
    rows = (torch.randn(300, ROW, generator=torch.Generator().manual_seed(1)) * magnitude).to(dtype)
    error = (through(row_format, rows) - rows).double().abs()
    largest = rows.double().abs().amax(1, keepdim=True)
    own = rows.double().abs() if row_format is FP8 else largest
    limit = HALF_STEP[row_format.name] * own + 2**-10 * largest / 448  # the smallest step of fp8
    rounding = torch.finfo(dtype).eps * largest if dtype in (torch.float16, torch.bfloat16) else 1e-6 * largest
    assert (error <= limit + rounding).all()


@FORMATS
def test_the_largest_element_zeros_and_tiny_elements_are_kept(row_format):
    rows = torch.zeros(3, ROW)
    rows[1, 7] = -3.5
    rows[2, 0] = 1e-45  # smaller than the smallest scale
    decoded = through(row_format, rows)
    assert decoded[0].eq(0).all()
    assert decoded[1, 7] == pytest.approx(-3.5, rel=1e-6)
    assert decoded[1].count_nonzero() == 1
    assert decoded[2].abs().max() <= 1.2e-38


@FORMATS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_with_an_element_that_is_not_finite_becomes_nan_and_no_other(row_format, bad):
    rows = torch.ones(400, ROW)
    rows[131, 200] = bad
    decoded = through(row_format, rows)
    assert decoded[131].isnan().all()
    assert decoded.isnan().sum() == ROW


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_total_of_pieces_is_their_sum_in_float32_rounded_once(row_format, dtype):
    generator, pieces = torch.Generator().manual_seed(2), []
    for _ in range(3):
        pieces.append(row_format.parts(torch.empty(row_format.piece_bytes(300), dtype=torch.uint8), 300))
        row_format.encode(torch.randn(300, ROW, generator=generator), *pieces[-1])
    exact = torch.zeros(250, ROW)
    for piece in pieces:
        row_format.add(*piece, exact, 1 / 3)
    total = torch.full((250, ROW), 7.0, dtype=dtype)  # fewer than the pieces have
    row_format.total(pieces, total, 1 / 3)
    assert torch.equal(total, exact.to(dtype))


@FORMATS
def test_float64_beyond_float32_becomes_nan(row_format):
    assert through(row_format, torch.full((1, ROW), 1e200, dtype=torch.float64)).isnan().all()


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, ranks=st.integers(1, 5), seed=st.integers(0, 99), average=st.booleans())
def test_the_fused_functions_reduce_as_an_all_to_all_between_them_would(shapes, ranks, seed, average):
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(ranks)]
    sent = [fused_quantize_into_fp8(tensors, ranks).view(ranks, -1) for tensors in inputs]
    result = []
    for rank in range(ranks):
        arrived = torch.stack([pieces[rank] for pieces in sent]).view(-1)
        fused_reduce_fp8(inputs[rank], arrived, ranks, rank, ReduceOp.AVG if average else ReduceOp.SUM)
        result.append(arrived.view(ranks, -1)[rank])
    outputs = [torch.full_like(tensor, math.nan) for tensor in inputs[0]]
    fused_dequantize_from_fp8(outputs, torch.stack(result).view(-1), ranks)
    for position, output in enumerate(outputs):
        exact = torch.stack([tensors[position] for tensors in inputs]).sum(0) / (ranks if average else 1)
        room = torch.stack([tensors[position].abs() for tensors in inputs]).sum(0) / (ranks if average else 1)
        assert output.isfinite().all()
        assert ((output - exact).abs() <= 0.13 * room + 0.01).all()


def test_the_fused_functions_write_tensors_that_are_not_contiguous():
    tensors = [torch.randn(6, 4).t(), torch.randn(8)[::2]]
    copies = [torch.zeros(6, 4).t(), torch.zeros(8)[::2]]
    fused_dequantize_from_fp8(copies, fused_quantize_into_fp8(tensors, 3), 3)
    for tensor, copy in zip(tensors, copies, strict=True):
        torch.testing.assert_close(copy, tensor, rtol=0.07, atol=1e-3)


def test_arguments_that_do_not_fit_are_refused():
    tensors = [torch.zeros(4)]
    buffer = fused_quantize_into_fp8(tensors, 2)
    for call, message in (
        (lambda: fused_quantize_into_fp8([], 2), "no tensors to quantize"),
        (lambda: fused_quantize_into_fp8(tensors, 0), "invalid number of ranks 0"),
        (
            lambda: fused_quantize_into_fp8([torch.zeros(3, dtype=torch.int32)], 2),
            "cannot quantize a tensor of torch.int32",
        ),
        (lambda: fused_dequantize_from_fp8(tensors, buffer, 3), "invalid buffer"),
        (lambda: fused_reduce_fp8(tensors, buffer, 2, 2), "invalid all_reduce_rank 2: expected 0 to 1"),
        (lambda: fused_reduce_fp8(tensors, buffer, 2, 0, ReduceOp.MAX), "expected ReduceOp.SUM or ReduceOp.AVG"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
