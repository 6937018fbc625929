"""Compare the losses of a job that was killed and resumed with those of an undisturbed one. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_STEP = re.compile(r"step (\d+) batch (\d+) loss (\S+)")
_RESUMED = re.compile(r"resumed at step (\d+)")
_WEIGHTS = re.compile(r"step \d+ weights (\w+)")


@dataclass(slots=True)
class Run:
    """The output of the trainers of one job, over all its incarnations."""

    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    """By step and number of the batch; the last one, if a step was repeated."""
    resumed: dict[str, int] = field(default_factory=dict)
    """Step at which each group resumed."""
    weights: dict[str, str] = field(default_factory=dict)
    """Digest of the weights of each group at its end."""
    differing: set[int] = field(default_factory=set)
    """Repeated steps whose loss differs from the first time."""
    steps: dict[str, int] = field(default_factory=dict)
    """Last step of each group."""

    def heard(self, group: str, line: str) -> None:
        """Process one line of a trainer."""
        if match := _STEP.fullmatch(line):
            key, loss = (int(match[1]), int(match[2])), match[3]
            if self.losses.get(key, loss) != loss:
                self.differing.add(key[0])
            self.losses[key] = loss
            self.steps[group] = key[0]
        elif match := _RESUMED.fullmatch(line):
            self.resumed[group] = int(match[1])
        elif match := _WEIGHTS.fullmatch(line):
            self.weights[group] = match[1]

    def reached(self, groups: int, step: int) -> bool:
        """Return whether so many groups have committed ``step``."""
        return sum(one >= step for one in self.steps.values()) == groups


def summary(undisturbed: Run, killed: Run, *, groups: int, killed_at: int) -> dict[str, Any]:
    """Return the content of the summary file.

    Args:
        undisturbed: the job without a kill.
        killed: the job whose groups and services were all killed.
        groups: number of groups in each.
        killed_at: step at which they were killed.
    """
    steps = sorted({step for step, _ in undisturbed.losses})
    differing = sorted(
        {key[0] for key in undisturbed.losses.keys() | killed.losses.keys()
         if undisturbed.losses.get(key) != killed.losses.get(key)} | killed.differing
    )  # fmt: skip
    resumed = sorted(killed.resumed.values())
    weights = {*undisturbed.weights.values(), *killed.weights.values()}
    complete = len(undisturbed.weights) == len(killed.weights) == groups
    return {
        "steps": steps[-1] if steps else 0,
        "killed_at_step": killed_at,
        "resumed_at_step": resumed[0] if resumed else None,
        "steps_lost": killed_at - resumed[0] if resumed else None,
        "groups_resumed": len(resumed),
        "losses_compared": len(undisturbed.losses),
        "steps_with_other_losses": differing,
        "weights_bit_identical": complete and len(weights) == 1,
        "succeeded": complete and len(weights) == 1 and not differing and len(resumed) == groups and resumed[0] > 0,
    }
