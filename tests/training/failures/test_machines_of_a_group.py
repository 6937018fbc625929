"""A group has its ranks on two machines, of which one dies, or which no longer reach each other."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.jobs.job import Job
from tests.support.network.namespaces import Host, Namespaces, why_not

pytestmark = [pytest.mark.training, pytest.mark.timeout(400)]


class JobOnMachines(Job):
    """Each rank of each group has a machine of its own."""

    def __init__(self, network: Namespaces) -> None:
        super().__init__("--initial-replicas", "2", "--insecure", bind=network.own_address)
        self._network = network
        self.replaced: set[str] = set()
        """Names of machines that another one stands in for."""

    def host_of_rank(self, group: str, rank: int) -> Host:
        name = f"{group}-{rank}"
        return self._network.host(f"new-{name}" if name in self.replaced else name)


@contextmanager
def machines() -> Iterator[Namespaces]:
    if reason := why_not():
        pytest.skip(reason)
    with Namespaces() as network:
        yield network


@pytest.mark.parametrize("dead", [0, 1])
async def test_a_group_ends_when_a_machine_of_it_dies_and_comes_back_on_another_one(dead: int) -> None:
    """Slow: four trainers, two of which start again."""
    with machines() as network:
        async with JobOnMachines(network) as job:
            a, b = [await job.start(name, ranks=2) for name in ("0", "1")]
            await job.advance(a, b)
            network.unplug(f"1-{dead}")
            b.kill(rank=dead)  # unplugged before, so no rank hears of it
            await job.advance(a)
            codes = await b.exit_codes()
            assert (codes[dead], codes[1 - dead]) == (-signal.SIGKILL, 75), job.report()
            job.replaced.add(f"1-{dead}")
            await job.start("1", ranks=2)
            await job.advance(a, b)
            assert job.assert_identical() > 10


async def test_both_ends_of_a_cut_through_a_group_end_and_it_comes_back_afterwards() -> None:
    """Slow: four trainers, two of which start again."""
    with machines() as network:
        async with JobOnMachines(network) as job:
            a, b = [await job.start(name, ranks=2) for name in ("0", "1")]
            await job.advance(a, b)
            network.cut("1-0", "1-1")
            await job.advance(a)
            assert await b.exit_codes() == [75, 75], job.report()
            network.mend()
            await job.start("1", ranks=2)
            await job.advance(a, b)
            assert job.assert_identical() > 10
