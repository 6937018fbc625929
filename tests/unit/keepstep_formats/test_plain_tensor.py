"""Tensors of torch.save are read straight into memory, if they are plain."""

from __future__ import annotations

import io

import pytest
import torch

from keepstep_formats.foreign_errors import ForeignCheckpointError
from keepstep_formats.pickled_items import load_pickled
from keepstep_formats.plain_tensor import read_plain_tensor

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(data, memory):
    return read_plain_tensor(io.BytesIO(b"before" + data + b"behind"), 6, len(data), memory)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 300), (2, 1, 4)])
def test_a_plain_tensor_of_every_dtype_is_read_from_the_middle_of_a_file(dtype, shape) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    memory = torch.zeros(shape, dtype=dtype)
    assert read(saved(tensor), memory)
    assert torch.equal(memory, tensor)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 2).t(),
        torch.ones(8)[:6].view(2, 3),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.ones(2, 3, dtype=torch.float16),
        torch.ones(6),
        torch.ones(2, 3).to(torch.float8_e4m3fn),
        [torch.ones(2, 3)],
        {"x": 1},
    ],
)
def test_a_value_that_is_not_the_plain_tensor_is_left_to_torch(value) -> None:
    assert not read(saved(value), torch.zeros(2, 3))


def test_damage_anywhere_but_in_the_padding_is_found() -> None:
    tensor = torch.arange(24.0)
    data = saved(tensor)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 4
        memory = torch.zeros(24)
        assert not read(bytes(damaged), memory) or torch.equal(memory, tensor), position
    for length in range(len(data)):
        assert not read(data[:length], torch.zeros(24)), length


@pytest.mark.filterwarnings("ignore")  # zipfile, on some of them
def test_damage_of_the_end_of_a_file_has_one_kind_of_error() -> None:
    data = saved(torch.arange(4.0))
    for position in range(len(data) - 120, len(data)):  # where the entries and their sums are
        for bit in (1, 4, 128):
            damaged = bytearray(data)
            damaged[position] ^= bit
            try:
                assert torch.equal(load_pickled(bytes(damaged), "x"), torch.arange(4.0))
            except ForeignCheckpointError as error:
                assert "x" in str(error)  # noqa: PT017
