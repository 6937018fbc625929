"""The settings of decoupled groups, and the arithmetic of their merges. Pure.

Of arXiv 2604.21428 (Decoupled DiLoCo): a minimum quorum, a grace window, and a merge weighted by tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal


@dataclass(frozen=True, slots=True)
class Decoupled:
    """Settings of ``DiLoCo`` for groups of different speed. They must be equal in all groups.

    A group is ready for an outer step after one period. It trains on until ``min_groups`` are ready and ``grace`` is
    over. The groups that are ready then merge; the others train on, and contribute to a later outer step all that they
    have trained since their last one. A contribution weighs as much as it has tokens or steps.

    Args:
        min_groups: number of groups that an outer step needs.
        grace: how long an outer step waits for further groups, once ``min_groups`` are ready.
        max_periods: a group that has trained so many periods without an outer step stops and waits for one.
        weight_by: ``"steps"``: a contribution weighs its inner steps; ``"tokens"``: the tokens that
            ``DiLoCo.count_tokens`` counted for it.

    Raises:
        ValueError: a value is out of range.
    """

    min_groups: int = 1
    grace: timedelta = timedelta(seconds=1)
    max_periods: int = 10
    weight_by: Literal["steps", "tokens"] = "steps"

    def __post_init__(self) -> None:
        if self.min_groups < 1:
            raise ValueError(f"min_groups={self.min_groups} must be at least 1")
        if self.grace < timedelta(0):
            raise ValueError(f"grace={self.grace.total_seconds():g} s must not be negative")
        if self.max_periods < 1:
            raise ValueError(
                f"max_periods={self.max_periods} must be at least 1: a group is ready for an outer step after 1 period"
            )
        if self.weight_by not in ("steps", "tokens"):
            raise ValueError(f"weight_by={self.weight_by!r} must be 'steps' or 'tokens'")

    @property
    def line(self) -> str:
        """Line by which groups compare the settings."""
        grace, periods = self.grace.total_seconds(), self.max_periods
        return f"decoupled min_groups {self.min_groups} grace {grace:g} max_periods {periods} by {self.weight_by}"


def fragment_of(step: int, fragments: int) -> int:
    """Return the fragment of an outer step.

    Each ``fragments`` outer steps take every fragment once, in an order that changes: in a fixed order, a group that
    takes part in every ``fragments``-th outer step would contribute the same fragment each time, and never the others.

    Args:
        step: number of committed outer steps.
        fragments: number of fragments.
    """
    turn, place = divmod(step, fragments)
    drawn = random.Random(turn)  # noqa: S311  the same order in all groups
    return sorted(range(fragments), key=[drawn.random() for _ in range(fragments)].__getitem__)[place]


def share_of(weight: float, total: float, groups: int) -> float:
    """Return the factor of a contribution that turns the average over ``groups`` into the weighted one.

    It is exactly 1 for groups of equal weight.

    Args:
        weight: of the contribution.
        total: of all contributions; 0: no group contributes.
        groups: number of groups in the average.
    """
    return weight * groups / total if total else 0.0
