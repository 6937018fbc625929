"""The steps that a job commits over time, each counted once although all groups report it. Pure."""

from __future__ import annotations

from typing import Any

from keepstep_metrics.history.timeseries.series import Series

KEPT_QUORUMS = 16
"""Number of quorums whose late reports count once, too."""


class Commits:
    """Counts a step of a quorum when the first group reports it. A step that a later quorum repeats counts again."""

    def __init__(self) -> None:
        self.series = Series(1, "L")
        self._reached: dict[int, int] = {}
        """By quorum_id, the highest step that was counted, of the ``KEPT_QUORUMS`` newest quorums."""

    def count(self, t: float, quorum_id: int, step: int) -> None:
        """Note that a group committed ``step`` at ``t``."""
        if quorum_id not in self._reached and len(self._reached) == KEPT_QUORUMS:
            oldest = min(self._reached)
            if quorum_id < oldest:
                return
            del self._reached[oldest]
        if step > self._reached.get(quorum_id, 0):
            self._reached[quorum_id] = step
            self.series.count(t, 0)

    def begin_again(self) -> None:
        """Count from 0: the lighthouse has forgotten the job, and numbers its quorums from 1 again."""
        self._reached.clear()

    def dump(self) -> tuple[Any, dict[int, int]]:
        return self.series.dump(), {**self._reached}

    def load(self, dumped: Any) -> None:
        self.series.load(dumped[0])
        self._reached.update(dumped[1])
