"""The boxes of a global tensor that a ``ShardedTensor`` holds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from keepstep.state.errors import UnsupportedValue
from keepstep.state.values.known_classes import class_name
from keepstep.state.values.leaves import TORCH_DTYPE_NAMES
from keepstep.state.values.tensor_subclasses import is_whole_value, plain, refusal
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedTensor
from keepstep_mesh.protocol.boxes import Box, Sizes


def boxes_of(tensor: ShardedTensor) -> list[Box]:
    """Return the boxes of the global tensor that ``tensor`` holds, in the order of its elements.

    A range of a flattened box has several, up to two for each axis less one.
    """
    part = tensor.flattened_range
    if part is None:
        return [Box(tensor.global_offset, tensor.box_shape)]
    return [
        Box(tuple(map(sum, zip(tensor.global_offset, box.offset, strict=True))), box.shape)
        for box in boxes_of_range(tensor.box_shape, part.start, part.stop)
    ]


def pieces_of(tensor: ShardedTensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes that ``tensor`` holds, and the memory of each.

    Raises:
        CheckpointingException: ``tensor`` has no data.
        UnsupportedValue: see ``local_data``.
    """
    data = local_data(tensor)
    if tensor.flattened_range is None:
        return [(Box(tensor.global_offset, tensor.box_shape), data[(None,) * tensor.prepend_axis_num])]
    found, first = [], 0
    for box in boxes_of(tensor):
        found.append((box, data[first : first + box.volume].view(box.shape)))
        first += box.volume
    return found


def local_data(tensor: ShardedTensor) -> torch.Tensor:
    """Return the data of a part.

    Raises:
        CheckpointingException: it has none.
        UnsupportedValue: it wraps other tensors, or is quantized: such a value has no parts. Or it is not dense, has no
            memory, or has a dtype that cannot be stored.
    """
    if tensor.data is None:
        raise CheckpointingException(f"ShardedTensor {tensor.key!r} has no data: expected a tensor")
    if is_whole_value(tensor.data):
        raise UnsupportedValue(
            f"ShardedTensor {tensor.key!r} has a {class_name(type(tensor.data))} as data, which cannot be stored in "
            f"parts: use a ShardedObject, or a plain tensor"
        )
    data = plain(tensor.data, f"ShardedTensor {tensor.key!r}")
    if data.layout is not torch.strided or data.dtype not in TORCH_DTYPE_NAMES or data.is_meta:
        raise refusal(data, f"ShardedTensor {tensor.key!r}")
    return data


def boxes_of_range(shape: Sizes, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that hold elements ``start`` to ``stop`` of a flattened tensor of ``shape``, in their order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sizes, number: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((number, *box.offset), (1, *box.shape))
