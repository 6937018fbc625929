"""Memory and descriptors of the job's processes over time, and how fast they grow. Pure, except for ``sample``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from keepstep_chaos.observing import process_table
from keepstep_chaos.observing.targets import Places
from keepstep_chaos.vocabulary import Target

SETTLING_SECONDS = 30.0
"""From the first sample of a process: these are left out, because its caches still fill."""
LEAST_SAMPLES = 8
"""Of one process after it settled; processes with fewer are left out."""
MAX_SAMPLES = 8192
"""Of one process: over two hours at one each second."""


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Seconds."""
    resident_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of the processes of one target or role, after they had settled.

    The slopes are those of least squares over the age of the processes, each with a level of its own.
    """

    processes: int
    seconds: float
    """For which they were watched, added up."""
    resident_bytes: int
    """Of the largest one at its end."""
    bytes_per_minute: float
    descriptors: int
    descriptors_per_minute: float
    weight: float
    """Weight of the slopes in ``joint``: the squared distances of the ages from their mean, added up, in minutes²."""

    def json(self) -> dict[str, Any]:
        return {name: round(getattr(self, name), 4) for name in self.__slots__}


def growth(samples: Sequence[Sample]) -> Growth | None:
    """Return the growth of one process; None: too few samples."""
    settled = [one for one in samples if one.at - samples[0].at >= SETTLING_SECONDS]
    if len(settled) < LEAST_SAMPLES:
        return None
    middle = fmean(one.at for one in settled)
    minutes = [(one.at - middle) / 60 for one in settled]
    weight = sum(age * age for age in minutes)
    last = settled[-1]
    return Growth(
        1,
        last.at - settled[0].at,
        last.resident_bytes,
        sum(age * one.resident_bytes for age, one in zip(minutes, settled, strict=True)) / weight,
        last.descriptors,
        sum(age * one.descriptors for age, one in zip(minutes, settled, strict=True)) / weight,
        weight,
    )


def joint(parts: Iterable[Growth]) -> Growth:
    """Return the growth of all processes of ``parts``, which are not empty: as if computed from all samples."""
    parts = list(parts)
    weight = sum(one.weight for one in parts)
    return Growth(
        sum(one.processes for one in parts),
        sum(one.seconds for one in parts),
        max(one.resident_bytes for one in parts),
        sum(one.bytes_per_minute * one.weight for one in parts) / weight,
        max(one.descriptors for one in parts),
        sum(one.descriptors_per_minute * one.weight for one in parts) / weight,
        weight,
    )


@dataclass(slots=True)
class Resources:
    """Samples of all processes of all targets."""

    _samples: dict[tuple[Target, int], list[Sample]] = field(default_factory=dict)

    def sample(self, places: Places, now: float, down: Collection[Target]) -> None:
        """Look at the processes of all targets that work. Those that are ``down`` may still start."""
        for place in places.by_target.values():
            if place.target in down:
                continue
            for pid in place.pids:
                found = process_table.usage(pid)
                samples = self._samples.setdefault((place.target, pid), [])
                if found is not None and found.resident_bytes and len(samples) < MAX_SAMPLES:  # it is not ending
                    samples.append(Sample(now, found.resident_bytes, found.descriptors))

    def growth(self) -> dict[Target, Growth]:
        """Return the growth of each target, from its processes that were watched long enough."""
        found: dict[Target, list[Growth]] = {}
        for (target, _), samples in self._samples.items():
            if (one := growth(samples)) is not None:
                found.setdefault(target, []).append(one)
        return {target: joint(parts) for target, parts in found.items()}
