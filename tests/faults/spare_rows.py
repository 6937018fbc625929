"""Fault runs of jobs with spares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.faults.row import TURN_SECONDS, Run
from tests.support.jobs.job import Group, discarded
from tests.support.jobs.mesh import Mesh
from tests.support.jobs.spares import participants, stands_by, with_spares

GROUPS = 3
SPARES = with_spares(GROUPS)
"""Environment of the three groups that train, and of one that stands by."""


@asynccontextmanager
async def _four_groups(run: Run) -> AsyncIterator[tuple[Mesh, list[Group]]]:
    """Train with three groups; the fourth stands by."""
    async with run.mesh("a", "b", "c", **SPARES) as (mesh, groups):
        yield mesh, [*groups, await mesh.start("d", **SPARES)]


async def group_killed_with_a_spare(run: Run) -> None:
    """Measure from the kill to the first commit in which three groups take part again."""
    async with _four_groups(run) as (mesh, groups):
        for turn in run.turns:
            victim, spare = groups[turn % GROUPS], groups[-1]
            watched = groups[(turn + 1) % GROUPS]
            async with asyncio.timeout(TURN_SECONDS):
                await stands_by(mesh, spare.name)
                killed = time.time()
                victim.kill()
                await mesh.until(lambda: _complete_again(watched, killed), "three groups take part")  # noqa: B023
                run.note((_complete_again(watched, killed) or killed) - killed)
                await mesh.start(victim.name, **SPARES)
            groups[turn % GROUPS], groups[-1] = spare, victim
        assert len(mesh.events("spare_in")) == len(run.turns)


def _complete_again(group: Group, since: float) -> float | None:
    """When three groups took part, after a step with fewer; None: not yet."""
    counts = participants(group, since)
    fewer = next((t for t, count in counts if count < GROUPS), None)
    return next((t for t, count in counts if fewer is not None and t > fewer and count == GROUPS), None)


async def group_replaced(run: Run) -> None:
    async with _four_groups(run) as (mesh, groups):
        for turn in run.turns:
            victim, spare = groups[turn % GROUPS], groups[-1]
            others = [group for group in groups if group not in (victim, spare)]
            await stands_by(mesh, spare.name)
            lost, since = len(discarded(*groups)), time.time()
            async with run.gap(mesh, *others):
                await mesh.order("POST", f"/replicas/{victim.name}/replace", reason="bad fan")
                assert await victim.exit_codes() == [0]
            assert len(discarded(*groups)) == lost, "a step was discarded"
            fewest = min(count for _, count in participants(others[0], since))
            assert fewest >= GROUPS, f"{fewest} groups took part in a step"
            await mesh.start(victim.name, **SPARES)
            groups[turn % GROUPS], groups[-1] = spare, victim
