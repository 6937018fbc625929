"""Groups of a job with spares."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from tests.support.jobs.job import DEADLINE, Group, Job


def with_spares(groups: int, spares: int = 1) -> dict[str, str]:
    """Environment of all groups of a job in which ``groups`` train."""
    return {"NUM_REPLICA_GROUPS": str(groups + spares), "KEEPSTEP_SPARES": str(spares)}


async def stands_by(job: Job, name: str) -> None:
    """Wait until the lighthouse has a request of this group, which is a spare."""
    async with asyncio.timeout(DEADLINE):
        while True:
            replicas = (await job.order("GET", "/replicas"))["replicas"]
            if any(one["name"] == name and one["state"] == "spare" and one["address"] for one in replicas):
                return
            await asyncio.sleep(0.02)  # a state of the lighthouse, which no trainer prints


def participants(group: Group, since: float) -> list[tuple[float, int]]:
    """When the group committed, and how many groups took part, for each commit after ``since`` (Unix time)."""
    commits = [event for event in group.lines if event["event"] == "committed"]
    return [
        (after["t"], after["batches"] - before["batches"])
        for before, after in pairwise(commits)
        if after["t"] > since and after["step"] == before["step"] + 1
    ]
