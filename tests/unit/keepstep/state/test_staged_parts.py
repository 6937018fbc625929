"""Copies of a state for a save in the background, and the memory that they share."""

from __future__ import annotations

import pytest
import torch

from keepstep.state.errors import UnsupportedValue
from keepstep.state.flattening import flatten
from keepstep.state.local_parts import TensorPart, local_parts
from keepstep.state.staged_parts import StagedParts, StagingBuffers
from keepstep.state.state_bytes import save_state

DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8, torch.int64)


def staged(buffers, **state):
    return StagedParts(local_parts(flatten(state)), buffers)


def copied(staged, key):
    part = staged.parts[key]
    assert isinstance(part, TensorPart)
    return part.pieces[0][1]


def test_a_copy_has_the_values_of_every_dtype_and_shape_and_does_not_change():
    state = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    state |= {"0-d": torch.tensor(5), "empty": torch.empty(3, 0), "gaps": torch.arange(12.0).reshape(3, 4)[:, ::2]}
    expected = {key: value.clone() for key, value in state.items()}
    copy = staged(StagingBuffers(), **state, words=["a"])
    for value in state.values():
        value.zero_()
    for key, value in expected.items():
        assert copied(copy, key).dtype == value.dtype
        assert torch.equal(copied(copy, key).double() if value.is_floating_point() else copied(copy, key),
                           value.double() if value.is_floating_point() else value)  # fmt: skip
    assert copy.parts["words"].value == ["a"]


def test_tied_tensors_are_copied_once():
    weight = torch.ones(4)
    copy = staged(StagingBuffers(), one=weight, other=weight)
    assert copied(copy, "one").data_ptr() == copied(copy, "other").data_ptr()


def test_the_next_copy_uses_the_memory_of_a_released_one_and_never_that_of_one_in_use():
    buffers = StagingBuffers()
    first = staged(buffers, weight=torch.ones(1000))
    second = staged(buffers, weight=torch.zeros(1000))
    assert copied(first, "weight").sum() == 1000, "the second did not touch it"
    place = copied(second, "weight").data_ptr()
    second.release()
    third = staged(buffers, weight=torch.full((900,), 3.0))
    assert copied(third, "weight").data_ptr() == place
    third.release()
    assert copied(staged(buffers, weight=torch.ones(10)), "weight").data_ptr() != place, "much larger than needed"


def test_a_copy_that_fails_gives_its_memory_back():
    buffers = StagingBuffers()
    first = staged(buffers, weight=torch.ones(1000))
    place = copied(first, "weight").data_ptr()
    first.release()
    with pytest.raises(NotImplementedError, match="meta"):
        staged(buffers, weight=torch.ones(1000, device="meta"))
    assert copied(staged(buffers, weight=torch.ones(1000)), "weight").data_ptr() == place


def test_a_value_that_cannot_be_copied_fails_before_a_copy_of_a_tensor_begins():
    class Stubborn:
        def __deepcopy__(self, memo):
            raise RuntimeError("no copy of this")

    class Unused(StagingBuffers):
        def take(self, size):
            raise AssertionError(size, "no memory is needed for a state that cannot be saved")

    with pytest.raises(UnsupportedValue, match=r"state\['value'\] is a .*Stubborn, which a checkpoint cannot store"):
        StagedParts(local_parts(flatten({"w": torch.ones(3), "value": Stubborn()})), Unused())


def test_a_tensor_and_its_conjugate_are_two_copies():
    base = torch.tensor([1 + 2j, 3 - 4j])
    parts = staged(StagingBuffers(), a=base, b=base.conj(), c=base.imag, d=base.conj().imag)
    assert torch.equal(copied(parts, "a"), torch.tensor([1 + 2j, 3 - 4j]))
    assert torch.equal(copied(parts, "b"), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(copied(parts, "c"), torch.tensor([2.0, -4.0]))
    assert torch.equal(copied(parts, "d"), torch.tensor([-2.0, 4.0]))


def test_a_result_with_a_graph_is_copied_as_a_part_of_an_object():
    weight = torch.ones(3, requires_grad=True)
    result = weight * 2
    copies = staged(StagingBuffers(), value=(result, result, 1)).parts["value"].value
    assert torch.equal(copies[0], torch.full((3,), 2.0))
    assert copies[0] is copies[1]
    assert copies[0].data_ptr() != result.data_ptr()


def test_only_the_bytes_of_a_view_are_copied_and_stored():
    storage = torch.arange(1 << 18, dtype=torch.float32)

    class Counting(StagingBuffers):
        def take(self, size):
            assert size < 1 << 10, "all of the storage is copied"
            return super().take(size)

    copies = staged(Counting(), part=storage[5:9], other=storage[1 << 17 :][:4])
    assert torch.equal(copied(copies, "part"), storage[5:9])
    assert len(save_state({"part": storage[5:9], "other": storage[1 << 17 :][:4]})[1]) < 1 << 10
