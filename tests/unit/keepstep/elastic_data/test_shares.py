from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic_data.shares import Batches, Position

SIZES = st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans()).filter(lambda one: one[1] <= one[0])


@given(SIZES, st.integers(0, 59), st.integers(0, 30), st.integers(0, 30))
def test_steps_add_up(sizes: tuple[int, int, bool], sample: int, first: int, second: int) -> None:
    batches = Batches(*sizes)
    begin = batches.advance(Position(3, sample % sizes[0]), 0)
    assert batches.advance(batches.advance(begin, first), second) == batches.advance(begin, first + second)


@given(SIZES, st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_sample_of_an_epoch_is_in_one_share_whatever_the_numbers_of_ranks(
    sizes: tuple[int, int, bool], ranks_of_steps: list[int]
) -> None:
    batches, at, taken, step = Batches(*sizes), Position(0, 0), [], 0
    while at.epoch == 0:
        ranks = ranks_of_steps[step % len(ranks_of_steps)]
        shares = [batches.share(at, rank, ranks) for rank in range(ranks)]
        assert all(one.stop == other.start for one, other in pairwise(shares))
        assert math.isclose(sum(one.weight for one in shares), ranks)
        assert max(one.stop - one.start for one in shares) - min(one.stop - one.start for one in shares) <= 1
        taken += [sample for one in shares for sample in range(one.start, one.stop)]
        at, step = batches.advance(at, 1), step + 1
    length, size, drop_last = sizes
    assert taken == list(range(length // size * size if drop_last else length))
    assert step == batches.per_epoch
    assert at == Position(1, 0)


@given(SIZES, st.integers(1, 9), st.data())
def test_the_weighted_mean_of_the_ranks_is_the_mean_of_all_samples(
    sizes: tuple[int, int, bool], ranks: int, drawn: st.DataObject
) -> None:
    batches = Batches(*sizes)
    at = batches.advance(Position(0, 0), drawn.draw(st.integers(0, 10)))
    shares = [batches.share(at, rank, ranks) for rank in range(ranks)]
    values = [sample**2 for sample in range(sizes[0])]

    def mean(start: int, stop: int) -> float:
        return sum(values[start:stop]) / (stop - start) if stop > start else 123.0

    average = sum(mean(one.start, one.stop) * one.weight for one in shares) / ranks
    assert math.isclose(average, mean(shares[0].start, shares[-1].stop))
