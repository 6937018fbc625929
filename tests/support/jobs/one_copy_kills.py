"""A job with one copy and a spare, whose members get SIGKILL at random moments, beside an undisturbed run.

python -m tests.support.jobs.one_copy_kills --kills 50 --seed 1

Three members train, with a spare. The job goes on until all kills were done, and then for some steps. The undisturbed
run takes as many steps: all ranks must have had the same shard after each of them. A rank that is killed between a
commit and its line of output tells no shard of that step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

from tests.support.jobs.job import Group
from tests.support.jobs.one_copy_job import OneCopyJob, told
from tests.support.processes import forked

MEMBERS, SPARES = 3, 1
LAST_STEPS = 20
"""After the last kill."""
AGAIN = 0.4
"""Part of the kills after which the spare that takes the empty seat is killed too."""
DELAYS = {"first": 0.15, "again": 0.5}
"""Longest time in seconds before a kill: within a step or two, or within a recovery."""
SECONDS_OF_KILL = 60.0


class KilledJob(OneCopyJob):
    """Kills members at random.

    Args:
        kills: number of them.
        seed: of the choice of moments and members.
    """

    def __init__(self, kills: int, seed: int) -> None:
        super().__init__("--finish-grace", "0", min_replicas=MEMBERS)
        self._kills = kills
        self._random = random.Random(seed)
        self._last_step = self.directory / "last-step"
        self.done: list[str] = []
        """Member and step of each kill."""

    async def run(self) -> list[dict[str, Any]]:
        """Train under all kills. Return what the ranks say at the end."""
        self._last_step.write_text(str(10**9))
        async with asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(self._kill_all())
            training = tasks.create_task(self.train(MEMBERS, SPARES, steps=self._last_step))
        killing.result()
        return training.result()

    async def _kill_all(self) -> None:
        while len(self.done) < self._kills:
            members = await self._all_there()
            await asyncio.sleep(self._random.uniform(0.0, DELAYS["first"]))  # the moment of a kill is random
            victim = self._random.choice(members)
            spare = next(group for group in self.groups.values() if group not in members)
            self._kill(victim)
            if len(self.done) < self._kills and self._random.random() < AGAIN:
                await asyncio.sleep(self._random.uniform(0.0, DELAYS["again"]))
                self._kill(spare)
        await self._all_there()
        self._last_step.write_text(str(self._newest() + LAST_STEPS))

    def _kill(self, group: Group) -> None:
        self.done.append(f"{group.name} at step {self._newest()}")
        group.kill()

    def _newest(self) -> int:
        steps = [line["step"] for group in self.groups.values() for line in group.lines if line["event"] == "committed"]
        return max(steps, default=0)

    async def _all_there(self) -> list[Group]:
        """Wait until all members train and the spare has begun. Return the members."""
        before = self._newest()

        def training() -> list[Group]:
            return [one for one in self.groups.values() if one.ranks and one.step() > before]

        def all_there() -> bool:
            begun = [one for one in self.groups.values() if one.ranks and one.has("started", one.ranks[0].pid)]
            return len(begun) == MEMBERS + SPARES and len(training()) == MEMBERS

        await self.until(all_there, "all members train", SECONDS_OF_KILL)
        return training()


async def compare(kills: int, seed: int) -> KilledJob:
    """Run both jobs. AssertionError: they differ."""
    async with KilledJob(kills, seed) as job:
        job.seconds = SECONDS_OF_KILL * (kills + 2)
        ends = await job.run()
        shards = job.shards()
    steps = ends[0]["step"]
    async with OneCopyJob(min_replicas=MEMBERS) as undisturbed:
        undisturbed.seconds = job.seconds
        expected = await undisturbed.train(MEMBERS, steps=steps)
        wanted = undisturbed.shards()
        different = sorted(key for key, digest in shards.items() if wanted[key] != digest)
        assert not different, f"(step, rank) with other shards: {different[:9]}; kills: {job.done}"
        assert told(expected) == told(ends), f"final states differ; kills: {job.done}"
    assert len(job.done) == kills
    assert {step for step, _ in shards} == set(range(1, steps + 1)), "a step is missing"
    return job


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    forked.install()
    try:
        job = asyncio.run(compare(options.kills, options.seed))
    finally:
        forked.close()
    print(f"{len(job.done)} kills, {job._newest()} steps, {time.monotonic() - began:.0f} s: weights are bit-equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
