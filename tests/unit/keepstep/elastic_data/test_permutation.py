from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic_data.permutation import Permutation


@given(st.integers(1, 3000), st.integers(-(2**63), 2**63), st.integers(0, 10**6))
def test_every_position_has_a_sample_of_its_own(length: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(length, seed, epoch).at(0, length)) == list(range(length))


def test_pieces_are_those_of_the_whole_and_seeds_and_epochs_have_other_orders() -> None:
    whole = Permutation(1000, 1, 2).at(0, 1000)
    assert Permutation(1000, 1, 2).at(300, 777) == whole[300:777]
    assert len({tuple(Permutation(1000, seed, epoch).at(0, 1000)) for seed in (1, 2) for epoch in (1, 2)}) == 4


def test_the_order_of_a_seed_does_not_change_between_releases() -> None:
    assert Permutation(10, 0, 0).at(0, 10) == [9, 0, 7, 8, 5, 4, 3, 6, 1, 2]
    assert Permutation(10**12, 7, 3).at(5, 8) == [274742208183, 243592109597, 830036097456]


def test_neighbors_and_places_are_as_random_as_those_of_a_good_shuffle() -> None:
    length, epochs = 64, 4000
    orders = np.array([Permutation(length, 5, epoch).at(0, length) for epoch in range(epochs)])
    for column in (0, 31, 63):  # each sample comes to each place equally often
        counts = np.bincount(orders[:, column], minlength=length)
        assert ((counts - epochs / length) ** 2 / (epochs / length)).sum() < 130  # chi-square, 63 degrees: p = 1e-6
    steps = np.bincount((orders[:, 1:] - orders[:, :-1]).ravel() % length, minlength=length)[1:]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() < 130
