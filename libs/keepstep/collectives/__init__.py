"""Collectives that send less: quantized all-reduce and reduce-scatter, and the codecs of outer reductions."""

from keepstep.collectives.all_reduce import allreduce_quantized
from keepstep.collectives.padding import allocate_reduce_scatter_output, get_padded_sizes
from keepstep.collectives.reduce_scatter import reduce_scatter_quantized

__all__ = [
    "allocate_reduce_scatter_output",
    "allreduce_quantized",
    "get_padded_sizes",
    "reduce_scatter_quantized",
]
