"""Fault runs in which groups keep others from committing: they fail by themselves, heal in vain, or are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.faults.row import TURN_SECONDS, Run
from tests.support.jobs.job import Group
from tests.support.jobs.mesh import Mesh

TIMEOUT = 5.0
"""Seconds of a collective."""
TWO_ROUNDS = 2 * TIMEOUT + 3.0
"""Limit of the gap: two rounds fail, and the quorum forms."""
TWO_STEPS = 5.0
"""The same where a step fails at once: 3 s, and two steps on a busy machine."""
BEFORE_SECONDS = 10.0
DURING_SECONDS = 60.0
"""Times over which the commits per second are counted: before the trouble, and from the first commits in it on."""
KEPT = 0.9
"""Part of their time that the other groups keep; failed steps, and the waits after them, take the rest. The number of
commits also depends on what else the machine does."""
DOWN_SECONDS, UP_SECONDS = 4.0, 2.0
"""Of a link that flaps. It is up again when a collective times out, and down before one has sent again."""


def _kept(group: Group, since: float) -> float:
    """Return the part of the time since ``since`` that did not go to steps that failed, and the waits after them."""
    lost, last, failed = 0.0, since, False
    for event in group.lines:
        if event["t"] > since and event["event"] == "discarded":
            failed = True
        elif event["t"] > since and event["event"] == "committed":
            lost += event["t"] - last if failed else 0.0
            last, failed = event["t"], False
    return 1 - lost / (time.time() - since)


def _rate(group: Group, since: float) -> float:
    """Return the commits per second of a group since ``since`` (Unix time)."""
    commits = sum(event["t"] > since for event in group.lines if event["event"] == "committed")
    return commits / (time.time() - since)


@asynccontextmanager
async def _turn(run: Run, mesh: Mesh, survivor: Group) -> AsyncIterator[None]:
    """Begin a trouble inside; note the gap that it causes, and fail if the others do not keep their pace."""
    await asyncio.sleep(BEFORE_SECONDS)  # the row measures a rate
    since = time.time()
    before = _rate(survivor, since - BEFORE_SECONDS)
    async with asyncio.timeout(TURN_SECONDS):
        yield
        await mesh.advance(survivor, steps=20)
        going = time.time()
        await asyncio.sleep(DURING_SECONDS)  # the row measures a rate
    kept, during = _kept(survivor, going), _rate(survivor, going)
    run.note(survivor.longest_gap(since))
    run.remark(f"the others kept {kept:.1%} of the time; {before:.1f} commits per second before, then {during:.1f}")
    assert kept >= KEPT, f"the others kept {kept:.1%} of the time"


def _with_network(begin: Callable[[Mesh, Group, Group], Awaitable[None]]) -> Callable[[Run], Awaitable[None]]:
    """A row with the groups ``a`` and ``b``, to which ``begin`` does something until it is cancelled, and ``c``."""

    async def play(run: Run) -> None:
        async with run.mesh("a", "b", "c", TRAINER_TIMEOUT=str(TIMEOUT)) as (mesh, groups):
            for turn in run.turns:
                one, other, survivor = (groups[(turn + shift) % 3] for shift in range(3))
                trouble = None
                try:
                    async with _turn(run, mesh, survivor):
                        trouble = asyncio.create_task(_awaited(begin(mesh, one, other)))
                finally:
                    if trouble is not None:
                        trouble.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await trouble
                    mesh.mend()
                await _readmit(mesh, one, other)
                await mesh.advance(*groups)

    return play


async def _readmit(mesh: Mesh, *groups: Group) -> None:
    """End the probation of these groups, so that the row need not wait for it."""
    leader = mesh.addresses[await mesh.leader()]
    async with aiohttp.ClientSession() as http:
        for group in groups:
            async with http.post(f"{leader}/v1/jobs/default/replicas/{group.name}/readmit", json={}) as answer:
                assert answer.status in (202, 409), await answer.text()  # 409: it is not parted


async def _awaited(trouble: Awaitable[None]) -> None:
    await trouble


async def _part(mesh: Mesh, one: Group, other: Group) -> None:
    mesh.part(one, other)


async def _drop(mesh: Mesh, one: Group, other: Group) -> None:
    mesh.drop(one, other)


async def _flap(mesh: Mesh, one: Group, other: Group) -> None:
    while True:
        mesh.part(one, other)
        await asyncio.sleep(DOWN_SECONDS)  # the rhythm of the link
        mesh.mend()
        await asyncio.sleep(UP_SECONDS)  # the rhythm of the link


groups_cut_off = _with_network(_part)
groups_cut_off_one_way = _with_network(_drop)
link_flaps = _with_network(_flap)


async def group_fails_by_itself(run: Run) -> None:
    async with run.mesh("a", "b", TRAINER_TIMEOUT=str(TIMEOUT)) as (mesh, (a, b)):
        trouble = mesh.directory / "trouble"
        c = await mesh.start("c", TRAINER_TIMEOUT=str(TIMEOUT), TRAINER_TROUBLE=str(trouble))
        for _ in run.turns:
            await mesh.advance(a, b, c)
            async with _turn(run, mesh, a):
                trouble.write_text("own")
            trouble.unlink()
            await _readmit(mesh, c)
        await mesh.advance(a, b, c)


async def heals_fail(run: Run) -> None:
    async with run.mesh("a", "b", TRAINER_TIMEOUT=str(TIMEOUT)) as (mesh, (a, b)):
        trouble = mesh.directory / "trouble"
        for turn in run.turns:
            trouble.write_text("heal")
            launcher = None
            try:
                async with _turn(run, mesh, a):
                    launcher = asyncio.create_task(_restart(mesh, trouble))
            finally:
                if launcher is not None:
                    launcher.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await launcher
            trouble.unlink()
            c = mesh.groups["c"]
            if c.ranks[0].exit_code is not None:
                c = await mesh.start("c", TRAINER_TIMEOUT=str(TIMEOUT))
            await _readmit(mesh, c)
            await mesh.advance(a, b, c)
            if turn != run.turns[-1]:
                c.kill()
                await c.exit_codes()


async def _restart(mesh: Mesh, trouble: Path) -> None:
    """Start the group ``c``, and start it again whenever it gives up after some failed heals."""
    while True:
        c = await mesh.start("c", TRAINER_TIMEOUT=str(TIMEOUT), TRAINER_TROUBLE=str(trouble))
        async with asyncio.timeout(TURN_SECONDS):
            while c.ranks[0].exit_code is None:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.2)
