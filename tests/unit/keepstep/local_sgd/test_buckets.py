"""Tensors that are reduced together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.local_sgd.buckets import allocate, assign, size_in_bytes

ITEMS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), max_size=30)
FORMS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    ),
    max_size=12,
)


@given(ITEMS, st.integers(1, 100))
def test_each_item_is_in_one_bucket_of_its_kind_and_buckets_are_full_at_most(items, cap) -> None:
    buckets = assign(items, cap)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({items[index][0] for index in bucket}) == 1
        assert len(bucket) == 1 or sum(items[index][1] for index in bucket) <= cap


@given(FORMS, st.none() | st.integers(1, 100))
def test_each_tensor_has_a_part_of_its_own_in_what_is_reduced(forms, cap) -> None:
    like = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
    whole, views = allocate(like, cap)
    assert [(one.shape, one.dtype) for one in views] == [(one.shape, one.dtype) for one in like]
    for one in whole:
        one.fill_(-1)
    for number, view in enumerate(views):
        view.fill_(number)
    for number, view in enumerate(views):
        assert torch.equal(view, torch.full_like(view, number)), "no other view writes here"
    assert all(one.numel() and one.is_contiguous() for one in whole)
    assert not any((one == -1).any() for one in whole), "nothing is reduced that no tensor has"


def test_the_size_of_a_bucket_is_above_0() -> None:
    assert size_in_bytes(0.5) == 2**19
    with pytest.raises(ValueError, match=r"bucket_cap_mb=0 must be above 0; None means 32 MiB"):
        size_in_bytes(0)
