"""Which samples a step takes, and which of them each rank takes. Pure.

A step takes the next ``global_batch_size`` samples of an epoch, however many groups there are. The position after a
number of committed steps therefore follows from the position before them alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next step begins: ``sample`` counts those of committed steps in this epoch."""

    epoch: int
    sample: int


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one step's samples that one rank takes: ``range(start, stop)`` of the order of the epoch."""

    position: Position
    start: int
    stop: int
    weight: float
    """By which the rank multiplies its mean loss, so that the average over all ranks is the mean over all samples."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Global batches of an endless sequence of epochs.

    Args:
        length: number of samples in an epoch.
        size: number of samples in a step of all groups.
        drop_last: leave out the last batch of an epoch if it has fewer than ``size`` samples.
    """

    length: int
    size: int
    drop_last: bool

    @property
    def per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return self._left(Position(0, 0))

    def _left(self, at: Position) -> int:
        samples = self.length - at.sample
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def advance(self, at: Position, steps: int) -> Position:
        """Return the position ``steps`` committed steps after ``at``."""
        left = self._left(at)
        if steps < left:
            return Position(at.epoch, at.sample + steps * self.size)
        epochs, steps = divmod(steps - left, self.per_epoch)
        return Position(at.epoch + 1 + epochs, steps * self.size)

    def share(self, at: Position, rank: int, ranks: int) -> Share:
        """Return the share of one of ``ranks`` ranks. Shares differ by one sample at most, and may be empty."""
        total = min(self.size, self.length - at.sample)
        start, stop = (at.sample + total * one // ranks for one in (rank, rank + 1))
        return Share(at, start, stop, (stop - start) * ranks / total)
