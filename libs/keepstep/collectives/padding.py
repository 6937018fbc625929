"""Shapes that divide evenly among ranks."""

from __future__ import annotations

import torch

from keepstep.quantization.slices import Slices, padded_sizes


def get_padded_sizes(tensors: list[torch.Tensor], world_size: int) -> list[torch.Size]:
    """Return the shapes of tensors whose first dimension is rounded up to a multiple of ``world_size``.

    Args:
        tensors: of any shapes.
        world_size: number of ranks.

    Returns:
        One shape for each tensor. A tensor of one dimension has the shape (n, 1), a scalar counts as one element.

    Raises:
        ValueError: ``world_size`` is less than 1.
    """
    return padded_sizes(tensors, world_size)


def allocate_reduce_scatter_output(
    tensors: list[torch.Tensor], world_size: int
) -> tuple[torch.Tensor, list[torch.Size]]:
    """Allocate the output of ``reduce_scatter_quantized``.

    Args:
        tensors: its inputs, on one device and of one type.
        world_size: number of ranks.

    Returns:
        A tensor of one dimension, and the padded shapes of the inputs. A rank's slice of each input, as many rows of
        the padded shape as ``world_size`` goes into them, is stored one after the other.

    Raises:
        ValueError: no tensors, a tensor that cannot be quantized, or different types or devices.
    """
    slices = Slices.of(tensors, world_size)
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
        raise ValueError(f"the tensors differ: {', '.join(kinds)}; expected one type and device")
    output = torch.empty(sum(slices.elements), dtype=tensors[0].dtype, device=tensors[0].device)
    return output, padded_sizes(tensors, world_size)
