"""Ranks that reduce with codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import Work

from keepstep.collectives.codecs import Codec
from keepstep.collectives.codecs.codec import Round
from keepstep.process_group import ProcessGroup
from tests.support.jobs.cohort import Cohort


class Step:
    """The part of a Manager that codecs use, for one rank of a cohort."""

    def __init__(self, group: ProcessGroup, *, contributes: bool = True, participants: int | None = None) -> None:
        self.round = Round(group, contributes, participants or group.size(), timedelta(seconds=20))

    def run_collective(self, tensors: list[torch.Tensor], start: Callable[[Round], Work]) -> Work:  # noqa: ARG002
        return start(self.round)


class Ranks:
    """Ranks that each have a codec."""

    def __init__(self, size: int, make: Callable[[], Codec]) -> None:
        self.cohort = Cohort(size)
        self.cohort.configure()
        self.make = make
        self.codecs = [make() for _ in range(size)]

    def average(
        self, inputs: list[list[torch.Tensor]], *, key: str = "all", committed: bool = True, idle: tuple[int, ...] = ()
    ) -> list[list[torch.Tensor]]:
        """Run a round of all ranks. Those of ``idle`` do not contribute."""

        def run(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
            tensors = [tensor.clone() for tensor in inputs[rank]]
            step = Step(group, contributes=rank not in idle, participants=group.size() - len(idle))
            assert self.codecs[rank].allreduce(step, key, tensors).wait()
            self.codecs[rank].settle(key, committed)
            return tensors

        return self.cohort.each(run)


@pytest.fixture
def ranks() -> Iterator[Callable[[int, Callable[[], Codec]], Ranks]]:
    """Makes ranks that are closed after the test."""
    made: list[Ranks] = []

    def make(size: int, codec: Callable[[], Codec]) -> Ranks:
        made.append(Ranks(size, codec))
        return made[-1]

    yield make
    for one in made:
        one.cohort.close()
