from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from keepstep.one_copy.step_loader import StepLoader

NUMBERS = TensorDataset(torch.arange(10))


class Place:
    """A rank whose step and world change."""

    def __init__(self) -> None:
        self.step, self.part = 0, (0, 1)

    def loader(self, **kwargs: Any) -> StepLoader:
        defaults: dict[str, Any] = {"used": str, "shuffle": True, "seed": 3, "drop_last": False}
        return StepLoader(NUMBERS, 4, step=lambda: self.step, part=lambda: self.part, **{**defaults, **kwargs})


def test_a_repeated_step_has_the_same_samples_divided_among_the_ranks_that_are_left() -> None:
    place = Place()
    loader = place.loader()
    epochs: list[list[int]] = []
    for place.step in range(6):
        drawn = []
        for parts in (3, 2):
            drawn.append([])
            for one in range(parts):
                place.part = one, parts
                (batch,) = loader.batch()
                drawn[-1] += batch.tolist() if loader.weight else []
        assert drawn[0] == drawn[1]
        if place.step % 3 == 0:
            epochs.append([])
        epochs[-1] += drawn[0]
        assert loader.epoch == place.step // 3
    assert [sorted(one) for one in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert len(loader) == 3


def test_a_loader_goes_on_at_any_step_in_its_order_and_leaves_out_a_small_batch() -> None:
    place = Place()
    place.step = 3
    loader = place.loader(shuffle=False, drop_last=True)
    assert loader.batch()[0].tolist() == [4, 5, 6, 7]
    assert (loader.epoch, len(loader)) == (1, 2)


def test_what_divides_the_dataset_is_refused() -> None:
    with pytest.raises(TypeError, match="StepLoader takes no batch_size"):
        Place().loader(batch_size=2)
    with pytest.raises(ValueError, match=r"global_batch_size=11 must be in \[1, 10\]"):
        StepLoader(NUMBERS, 11, step=int, part=lambda: (0, 1), used=str, shuffle=False, seed=0, drop_last=False)
