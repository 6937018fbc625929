"""The usual time of a step, and the goodput of a run. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

MAX_TIMES = 100_000
"""Times between two commits that are kept."""


@dataclass(slots=True)
class Pace:
    """Commits of all groups."""

    commits: int = 0
    """Of all groups: a step that four groups commit counts four times."""
    _times: list[float] = field(default_factory=list)
    _last: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By group, its last step, and when it committed."""

    def committed(self, group: str, step: int, at: float) -> None:
        last, self._last[group] = self._last.get(group), (step, at)
        self.commits += 1
        if last is not None and step == last[0] + 1 and at > last[1] and len(self._times) < MAX_TIMES:
            self._times.append(at - last[1])

    @property
    def step_seconds(self) -> float | None:
        """The usual time from one commit of a group to its next one; None: not known."""
        return median(self._times) if self._times else None

    def goodput(self, groups: int, seconds: float) -> float | None:
        """Return the share of the time of all groups that went into committed steps, each of the usual time.

        Args:
            groups: number of groups of the job.
            seconds: length of the run.
        """
        usual = self.step_seconds
        if usual is None or groups * seconds <= 0:
            return None
        return min(1.0, self.commits * usual / (groups * seconds))
