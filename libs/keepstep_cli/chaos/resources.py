"""Memory and descriptors of the job's processes over time, and how fast they grow. Pure, except for ``sample``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any

from keepstep_cli.chaos import process_table
from keepstep_cli.chaos.targets import Places
from keepstep_cli.chaos.vocabulary import Target

SETTLING_SECONDS = 30.0
"""From the first sample of a process: these are left out, because it still starts."""
LEAST_SAMPLES = 8
MAX_SAMPLES = 4096
"""Of one process: 80 minutes at one each second."""


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Seconds."""
    resident_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of one process. ``seconds``: for which it was watched after it had settled."""

    seconds: float
    resident_bytes: int
    """At the end."""
    bytes_per_minute: float
    descriptors: int
    descriptors_per_minute: float

    def json(self) -> dict[str, Any]:
        return {name: round(getattr(self, name), 2) for name in self.__slots__}


def growth(samples: Sequence[Sample]) -> Growth | None:
    """Return the growth by least squares; None: too few samples."""
    settled = [one for one in samples if one.at - samples[0].at >= SETTLING_SECONDS]
    if len(settled) < LEAST_SAMPLES:
        return None
    minutes = [one.at / 60 for one in settled]
    last = settled[-1]
    return Growth(
        last.at - settled[0].at,
        last.resident_bytes,
        linear_regression(minutes, [one.resident_bytes for one in settled]).slope,
        last.descriptors,
        linear_regression(minutes, [one.descriptors for one in settled]).slope,
    )


@dataclass(slots=True)
class Resources:
    """Samples of all processes of all targets."""

    _samples: dict[tuple[Target, int], list[Sample]] = field(default_factory=dict)

    def sample(self, places: Places, now: float) -> None:
        for place in places.by_target.values():
            for pid in place.pids:
                found = process_table.usage(pid)
                samples = self._samples.setdefault((place.target, pid), [])
                if found is not None and found.resident_bytes and len(samples) < MAX_SAMPLES:  # it is not ending
                    samples.append(Sample(now, found.resident_bytes, found.descriptors))

    def longest_lived(self) -> dict[Target, Growth]:
        """Return the growth of that process of each target which was watched the longest."""
        found: dict[Target, Growth] = {}
        for (target, _), samples in self._samples.items():
            one = growth(samples)
            if one is not None and (target not in found or one.seconds > found[target].seconds):
                found[target] = one
        return found
