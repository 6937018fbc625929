"""Which faults happen when, and to which processes, by the seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.faults import groups, lighthouses

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker
    from tests.simulation.simulation import Simulation

FIRST_SECOND, LAST_SECOND = 1.0, 12.0
"""Virtual seconds between which faults happen."""
MAX_FAULTS = 10


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        at: Virtual second.
        kind: Name of the function in ``faults`` that injects it.
        who: Number of a group.
        other: A number from 0 to 4 that ``kind`` decides with.
        seconds: Duration.
    """

    at: float
    kind: str
    who: int
    other: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:5.2f} s: {self.kind.replace('_', ' ')} (group {self.who}, {self.seconds:g} s, {self.other})"


Act = Callable[["Simulation", "Worker", Fault], None]

ALONE: Mapping[Act, int] = {**groups.WEIGHTS, **lighthouses.WEIGHTS}
"""Faults of a job that has one lighthouse, and how often each is drawn."""
SEVERAL: Mapping[Act, int] = {**ALONE, **lighthouses.STANDBY_WEIGHTS}
"""Faults of a job that has several lighthouses."""
ACTS = {
    act.__name__: act
    for act in (
        *SEVERAL,
        *groups.REPLACING,
        *groups.TROUBLE_WEIGHTS,
        *groups.HANG_WEIGHTS,
        *groups.ONE_COPY_WEIGHTS,
    )
}


MAX_REPLACEMENTS = 4


def draw_faults(
    seed: int,
    lighthouses: int,
    *,
    spares: bool = False,
    troubles: bool = False,
    hangs: bool = False,
    one_copy: bool = False,
) -> tuple[Fault, ...]:
    random = Random(f"faults {seed}")
    weights = ALONE if lighthouses == 1 else SEVERAL
    if troubles:
        weights = {**weights, **groups.TROUBLE_WEIGHTS}
    if hangs:
        weights = {**weights, **groups.HANG_WEIGHTS}
    if one_copy:
        weights = {act: weight for act, weight in weights.items() if act not in groups.OF_FULL_COPIES}
        weights |= groups.ONE_COPY_WEIGHTS
    kinds = [act.__name__ for act, weight in weights.items() for _ in range(weight)]
    moments = [
        FIRST_SECOND + (LAST_SECOND - FIRST_SECOND) * random.random() for _ in range(random.randint(1, MAX_FAULTS))
    ]
    if random.random() < 0.4:  # several at once
        moments = [moments[i - i % 3] + 0.1 * random.random() for i in range(len(moments))]
    drawn = [
        Fault(at, random.choice(kinds), random.randrange(5), random.randrange(5), random.choice((0.1, 0.4, 2.0, 6.0)))
        for at in sorted(moments)
    ]
    if spares:
        drawn = sorted(drawn + _replacements(seed), key=lambda fault: fault.at)
    return tuple(drawn)


def _replacements(seed: int) -> list[Fault]:
    random = Random(f"replacements {seed}")
    kinds = [act.__name__ for act in groups.REPLACING]
    moments = [random.uniform(FIRST_SECOND, LAST_SECOND) for _ in range(random.randint(1, MAX_REPLACEMENTS))]
    return [Fault(at, random.choice(kinds), random.randrange(8), 0, random.choice((0.4, 2.0, 6.0))) for at in moments]


def inject(sim: Simulation, fault: Fault) -> None:
    sim.note(f"FAULT {fault}")
    worker = sim.latest.get(sim.names[fault.who % len(sim.names)])
    if worker is not None:
        ACTS[fault.kind](sim, worker, fault)
