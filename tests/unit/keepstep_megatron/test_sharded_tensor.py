"""ShardedTensor describes a part of a global tensor, and refuses fields that do not fit each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.sharded import CheckpointingException, ShardedTensor


@st.composite
def grids(draw):
    """A global tensor, cut evenly: its key, its local shape, (position, fragments) along each axis, prepended axes."""
    local = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    prepended = draw(st.integers(0, 2))
    fragments = draw(st.lists(st.integers(1, 3), min_size=len(local) + prepended, max_size=len(local) + prepended))
    return local, prepended, [(draw(st.integers(0, count - 1)), count) for count in fragments]


@settings(max_examples=30)
@given(grids())
def test_rank_offsets_give_the_slice_of_the_global_tensor(grid) -> None:
    local, prepended, places = grid
    shape = [count * size for (_, count), size in zip(places, (1,) * prepended + local, strict=True)]
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    index = tuple(at * size for (at, _), size in zip(places, (1,) * prepended + local, strict=True))
    part = ShardedTensor.from_rank_offsets(
        "w", torch.empty(local, dtype=torch.int64), *((axis, *place) for axis, place in enumerate(places)),
        prepend_axis_num=prepended,
    )  # fmt: skip
    assert part.global_shape == tuple(shape)
    assert part.global_offset == index
    assert part.local_chunk_offset_in_global() == tuple(at for at, _ in places)
    assert part.max_allowed_chunks() == part.box_shape
    assert whole[part.global_slice()].shape == local


@settings(max_examples=30)
@given(grids(), st.data())
def test_coordinates_of_a_flattened_range_are_those_of_its_elements(grid, data) -> None:
    local, prepended, places = grid
    count = int(np.prod(local))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    part = ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(stop - start), local, *((axis, *place) for axis, place in enumerate(places)),
        prepend_axis_num=prepended, flattened_range=slice(start, stop),
    )  # fmt: skip
    whole = torch.arange(int(np.prod(part.global_shape))).reshape(part.global_shape)
    expected = whole[part.global_slice()].flatten()[start:stop]
    if part.global_shape:
        assert torch.equal(whole[tuple(map(torch.from_numpy, part.global_coordinates()))], expected)
    if local:
        box = torch.arange(count).reshape(local)
        assert torch.equal(box[tuple(map(torch.from_numpy, part.local_coordinates()))], torch.arange(start, stop))


@settings(max_examples=30)
@given(grids(), st.data())
def test_a_narrowed_part_is_that_of_a_narrowed_global_tensor(grid, data) -> None:
    local, prepended, places = grid
    if not local:
        return
    flat = data.draw(st.booleans())
    dim = 0 if flat else data.draw(st.integers(0, len(local) - 1))
    start = data.draw(st.integers(0, local[dim]))
    length = data.draw(st.integers(0, local[dim] - start))
    offsets = [(axis, *place) for axis, place in enumerate(places)]
    box = torch.arange(int(np.prod(local))).reshape(local)
    if flat:
        begin = data.draw(st.integers(0, box.numel()))
        end = data.draw(st.integers(begin, box.numel()))
        part = ShardedTensor.from_rank_offsets_flat(
            "w",
            box.flatten()[begin:end],
            local,
            *offsets,
            prepend_axis_num=prepended,
            flattened_range=slice(begin, end),
        )
    else:
        part = ShardedTensor.from_rank_offsets("w", box, *offsets, prepend_axis_num=prepended)
    kept = box.narrow(dim, start, length)
    expected = ShardedTensor.from_rank_offsets("w", kept, *offsets, prepend_axis_num=prepended)
    found = part.narrow(dim, start, length)
    if not flat:
        assert torch.equal(found[0].data, kept)
    elements = kept.flatten().tolist()
    assert [element for one in found for element in one.data.flatten().tolist()] == (
        [one for one in elements if begin <= one < end] if flat else elements
    )
    for one in found:
        assert replace(one, flattened_range=None, data=None) == expected.without_data()


def made(**changes):
    fields = {
        "key": "w",
        "data": torch.zeros(2, 3),
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (4, 3),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
    }
    return ShardedTensor(**{**fields, **changes})


def test_lists_and_torch_sizes_are_shapes_too() -> None:
    part = made(local_shape=torch.Size([2, 3]), global_shape=[4, 3], global_offset=[2, 0])
    assert (part.local_shape, part.global_shape, part.global_offset) == ((2, 3), (4, 3), (2, 0))
    assert type(part.local_shape) is tuple


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": torch.float64}, "has data of dtype torch.float32, but dtype torch.float64"),
        ({"data": torch.zeros(3, 2)}, r"has data of shape \(3, 2\): expected \(2, 3\)"),
        ({"global_offset": (2,)}, "expected 2 axes in the last two"),
        ({"global_shape": (1, 4, 3)}, "expected 2 axes in the last two"),
        ({"prepend_axis_num": 1}, "expected 3 axes in the last two"),
        ({"axis_fragmentations": (2,)}, "expected 2 axes, or None"),
        ({"global_offset": (1, 0)}, "has offset 1 along axis 0, which is not a multiple of the local size 2"),
        ({"global_offset": (4, 0)}, "has elements 4 to 6 of axis 0, outside of its global size 4"),
        ({"global_offset": (-2, 0)}, "has elements -2 to 0 of axis 0"),
        ({"flattened_range": slice(0, 6)}, r"has data of shape \(2, 3\): expected \(6,\)"),
        ({"flattened_range": slice(0, 6, 2)}, "without a step"),
        ({"flattened_range": slice(None, 6)}, "expected slice"),
        ({"flattened_range": slice(4, 7), "data": None}, r"expected a range of the 6 elements of \(2, 3\)"),
    ],
)
def test_fields_that_do_not_fit_are_refused_with_the_key(changes, problem) -> None:
    with pytest.raises(CheckpointingException, match=f"ShardedTensor 'w' .*{problem}"):
        made(**changes)


def test_parts_of_different_sizes_have_no_fragmentations() -> None:
    part = made(axis_fragmentations=None, global_offset=(1, 0))
    assert not part.has_regular_grid
    with pytest.raises(CheckpointingException, match="axis_fragmentations None"):
        part.max_allowed_chunks()
    with pytest.raises(CheckpointingException, match="offset 1 along axis 0"):
        part.local_chunk_offset_in_global()


def test_an_axis_that_is_not_cut_evenly_needs_allow_shape_mismatch() -> None:
    uneven = made(axis_fragmentations=(3, 1))
    with pytest.raises(CheckpointingException, match="has global size 4 along axis 0, which 3 parts do not cut evenly"):
        uneven.max_allowed_chunks()
    assert replace(uneven, allow_shape_mismatch=True).max_allowed_chunks() == (1, 3)


@pytest.mark.parametrize("offset", [(2, 0, 1), (-1, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 0)])
def test_an_invalid_rank_offset_is_refused(offset) -> None:
    with pytest.raises(CheckpointingException, match=rf"'w' has invalid rank offset \({offset[0]}, "):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), offset)


def test_an_axis_is_cut_once() -> None:
    with pytest.raises(CheckpointingException, match="each axis once"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2), (0, 1, 2))


def test_flat_and_whole_parts_have_a_constructor_each() -> None:
    with pytest.raises(ValueError, match="call from_rank_offsets_flat instead"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=slice(0, 2))
    with pytest.raises(CheckpointingException, match="pass a slice"):
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(2), (2,))
    with pytest.raises(CheckpointingException, match="no flattened_range"):
        made().global_coordinates()


def test_data_is_created_where_it_is_absent() -> None:
    part = made(data=None)
    part.init_data("cpu", torch.ones)
    assert torch.equal(part.data, torch.ones(2, 3))
    part.init_data("cpu")
    assert torch.equal(part.data, torch.ones(2, 3)), "data that exists was replaced"
    flat = made(data=None, flattened_range=slice(1, 3), dtype=torch.bfloat16)
    flat.init_data("meta")
    assert (flat.data.shape, flat.data.dtype, flat.data.device.type) == ((2,), torch.bfloat16, "meta")
    assert flat.nbytes == 4
    assert part.without_data().data is None
    assert part.data is not None


@pytest.mark.parametrize(
    ("narrow", "problem"),
    [
        ((2, 0, 1), "cannot narrow axis 2"),
        ((0, 1, 2), "cannot narrow axis 0 to 2 from 1"),
        ((0, -1, 1), "cannot narrow axis 0 to 1 from -1"),
    ],
)
def test_narrowing_beyond_the_part_is_refused(narrow, problem) -> None:
    with pytest.raises(CheckpointingException, match=problem):
        made().narrow(*narrow)


def test_a_flat_part_is_narrowed_along_its_first_axis_and_parts_of_different_sizes_are_not() -> None:
    with pytest.raises(CheckpointingException, match="along axis 0 only, not 1"):
        made(data=torch.zeros(6), flattened_range=slice(0, 6)).narrow(1, 0, 1)
    with pytest.raises(CheckpointingException, match="different sizes"):
        made(axis_fragmentations=None, global_shape=(5, 3)).narrow(0, 0, 1)
