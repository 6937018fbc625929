"""Batches of a dataset for a job whose model exists once: each sample of an epoch is in exactly one committed step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import data

from keepstep.elastic_data.elastic_loader import PlannedLoader
from keepstep.elastic_data.permutation import Order
from keepstep.elastic_data.shares import Batches, Position, Share

START = Position(0, 0)


class StepLoader(PlannedLoader):
    """Batches of one rank, loaded ahead. ``OneCopy.loader`` makes one.

    Which samples a step takes follows from its number alone, so that the loader has no state.

    Args:
        dataset: with a length.
        global_batch_size: number of samples in a step of all ranks.
        step: returns the number of committed steps.
        part: returns the number of this rank among those that take different samples, and how many these are.
        used: called by ``batch`` with the values that all ranks must share.
        shuffle: whether the order is random, another one in each epoch.
        seed: of the order; equal in all ranks.
        drop_last: leave out the last batch of an epoch if it has fewer than ``global_batch_size`` samples.
        **kwargs: of ``torch.utils.data.DataLoader``, such as ``num_workers``.

    Raises:
        TypeError: an argument of DataLoader that divides the dataset into batches.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        dataset: data.Dataset[Any],
        global_batch_size: int,
        *,
        step: Callable[[], int],
        part: Callable[[], tuple[int, int]],
        used: Callable[[str], object],
        shuffle: bool,
        seed: int,
        drop_last: bool,
        **kwargs: Any,
    ) -> None:
        self.length = len(dataset)  # type: ignore[arg-type]
        if not 1 <= global_batch_size <= self.length:
            raise ValueError(
                f"global_batch_size={global_batch_size} must be in [1, {self.length}], the dataset's length"
            )
        self._common = (
            f"samples={self.length}, global_batch_size={global_batch_size}, shuffle={shuffle}, seed={seed}, "
            f"drop_last={drop_last}"
        )
        self._batches = Batches(self.length, global_batch_size, drop_last)
        self._order = Order(self.length, seed, shuffle=shuffle)
        self._step, self._part, self._used = step, part, used
        self._share: Share | None = None
        super().__init__(dataset, self, **kwargs)

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0 on."""
        return self._position().epoch

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the last batch.

        Its samples times the number of parts, divided by the samples of the step: 1 for even parts, 0 where a step has
        fewer samples than parts. The batch then has one sample, which another rank counts.
        """
        return 1.0 if self._share is None else self._share.weight

    def batch(self) -> Any:
        """Return the batch of this rank in this step. Call it once in each attempt.

        A step that is tried again has the same samples.

        Raises:
            RuntimeError: the job has not begun.
        """
        self._share = self.share_at(self._position())
        self._used(self._common)
        return self._load(self._share)

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return self._batches.per_epoch

    def _position(self) -> Position:
        return self._batches.advance(START, self._step())

    # ---- for the loader

    def share_at(self, at: Position) -> Share:
        """Return this rank's share of the step at ``at``."""
        return self._batches.share(at, *self._part())

    def after(self, at: Position) -> Position:
        """Return the position after a committed step at ``at``."""
        return self._batches.advance(at, 1)

    def indices(self, share: Share) -> list[int]:
        """Return the indices of a share into the dataset."""
        return self._order.indices(share)
