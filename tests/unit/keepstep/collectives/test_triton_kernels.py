"""The Triton kernels compute what the operations of torch do."""

from __future__ import annotations

import math

import pytest
import torch

from keepstep.quantization import fused_dequantize_from_fp8, fused_quantize_into_fp8
from keepstep.quantization.row_format import FP8, ROW, _kernels

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or _kernels(torch.zeros(1, device="cuda")) is None,
    reason="needs a CUDA device with e4m3, and Triton",
)


@pytest.mark.parametrize("kernel", ["_add", "_decode"])
def test_the_compiled_kernels_round_after_each_multiplication_as_torch_does(kernel: str) -> None:
    """A fused multiply-add has other bits than torch's operations, with which groups without the kernels compute."""
    compiler = pytest.importorskip("triton.compiler", reason="needs Triton, which compiles for a GPU without one")
    from triton.backends.compiler import GPUTarget

    from keepstep.quantization import triton_kernels

    signature = {"scales": "*fp32", "values": "*fp8e4nv", "row_elements": "constexpr"}
    signature |= {"total" if kernel == "_add" else "rows": "*fp32"}
    source = compiler.ASTSource(getattr(triton_kernels, kernel), signature, constexprs={"row_elements": ROW})
    target = GPUTarget("cuda", 90, 32)
    assembly = compiler.compile(source, target=target, options=triton_kernels.OPTIONS).asm["ptx"]
    assert "mul.rn.f32" in assembly
    assert "fma" not in assembly


def parts(rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return FP8.parts(torch.zeros(FP8.piece_bytes(rows), dtype=torch.uint8, device=device), rows)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_encoded_decoded_and_added_as_in_main_memory(dtype):
    rows = torch.randn(500, ROW).to(dtype)
    rows[3] = 0
    rows[5, 7], rows[6, 9] = math.nan, -math.inf
    (scales, values), (their_scales, their_values) = parts(500, "cpu"), parts(500, "cuda")
    FP8.encode(rows, scales, values)
    FP8.encode(rows.cuda(), their_scales, their_values)
    torch.testing.assert_close(their_scales.cpu(), scales, equal_nan=True)
    decoded, theirs = torch.empty_like(rows), torch.empty_like(rows, device="cuda")
    FP8.decode(scales, values, decoded)
    FP8.decode(their_scales, their_values, theirs)
    torch.testing.assert_close(theirs.cpu(), decoded, rtol=0.13, atol=1e-3, equal_nan=True)  # one step of fp8
    exact = torch.empty(500, ROW)
    FP8.decode(their_scales.cpu(), their_values.cpu(), exact)
    assert torch.equal(theirs.cpu().nan_to_num(), exact.to(dtype).nan_to_num())
    total, there = torch.ones(500, ROW), torch.ones(500, ROW, device="cuda")
    FP8.add(their_scales.cpu(), their_values.cpu(), total, 0.5)
    FP8.add(their_scales, their_values, there, 0.5)
    assert torch.equal(there.cpu().nan_to_num(), total.nan_to_num())
    summed, sum_there = torch.empty_like(rows), torch.empty_like(rows, device="cuda")
    FP8.total([(their_scales.cpu(), their_values.cpu())] * 2, summed, 0.5)
    FP8.total([(their_scales, their_values)] * 2, sum_there, 0.5)
    assert torch.equal(sum_there.cpu().nan_to_num(), summed.nan_to_num())


@on_gpu
def test_the_fused_functions_run_on_the_device():
    tensors = [torch.randn(33, 70, device="cuda"), torch.randn(9, device="cuda", dtype=torch.bfloat16)]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    fused_dequantize_from_fp8(copies, fused_quantize_into_fp8(tensors, 3), 3)
    for tensor, copy in zip(tensors, copies, strict=True):
        torch.testing.assert_close(copy, tensor, rtol=0.07, atol=1e-2)
