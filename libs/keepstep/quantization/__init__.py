"""Quantization of float tensors to 8 bits, as quantized collectives send them."""

from keepstep.quantization.fused import fused_dequantize_from_fp8, fused_quantize_into_fp8, fused_reduce_fp8

__all__ = ["fused_dequantize_from_fp8", "fused_quantize_into_fp8", "fused_reduce_fp8"]
