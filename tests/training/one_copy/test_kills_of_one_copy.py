"""A model that exists once, in real processes that real signals end: no committed step is lost.

Slow: each test trains in several processes, some of which start again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.job import Group, Job
from tests.support.jobs.spares import with_spares

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

SECONDS = 120.0


class OneCopyJob(Job):
    def check_history(self) -> None:
        """The step logs of a Manager do not exist in such a job."""

    def variables(
        self, members: int, spares: int = 0, *, kind: str = "plain", faults: str = "", **more: Any
    ) -> dict[str, str]:
        """The environment of each member."""
        return {
            "TRAINER_ONE_COPY": "1",
            "ONE_COPY_DIRECTORY": str(self.directory),
            "ONE_COPY_KIND": kind,
            "ONE_COPY_FAULTS": faults,
            **with_spares(members, spares),
            **{f"ONE_COPY_{name.upper()}": str(value) for name, value in more.items()},
        }

    async def train(self, members: int, spares: int = 0, *, ranks: int = 1, **more: Any) -> list[dict[str, Any]]:
        """Start the members again whenever they are killed. Return what they say at the end, by rank."""
        variables = self.variables(members, spares, **more)
        names = [f"m{number}" for number in range(members + spares)]
        for name in names:
            await self.start(name, ranks=ranks, **variables)

        def done() -> list[dict[str, Any]]:
            return [event for group in self.groups.values() for event in group.lines if event["event"] == "finished"]

        def ended() -> list[str]:
            return [n for n in names if all(one.exit_code is not None for one in self.groups[n].ranks)]

        async with asyncio.timeout(SECONDS):
            while len(done()) < members * ranks:
                await self.until(lambda: len(done()) >= members * ranks or ended(), "an end", SECONDS)
                for name in ended():
                    group = self.groups[name]
                    codes = [one.exit_code for one in group.ranks]
                    if not any(event["event"] == "finished" and self._own(group, event) for event in group.lines):
                        assert -signal.SIGKILL in codes, f"{name} {codes}\n{self.report()}"
                        await self.start(name, ranks=ranks, **variables)
            for name in names:
                codes = await self.groups[name].exit_codes()
                assert set(codes) <= {0, 75}, f"{name}: {codes}\n{self.report()}"
        return sorted(done(), key=lambda one: one["rank"])

    @staticmethod
    def _own(group: Group, event: dict[str, Any]) -> bool:
        return any(one.pid == event["pid"] for one in group.ranks)

    async def thaw_when_step_is(self, step: int) -> None:
        """Let a frozen process go on when others have committed ``step``."""

        def frozen() -> list[Group]:
            return [one for one in self.groups.values() if any(event["event"] == "fault" for event in one.lines)]

        await self.until(lambda: frozen() and step in self.losses(), "the others go on", SECONDS)
        frozen()[0].kill(number=signal.SIGCONT)

    def losses(self) -> dict[int, float]:
        """The loss of each committed step, which all ranks agree on."""
        return self._agreed("loss", lambda event: event["step"])

    def shards(self) -> dict[tuple[int, int], str]:
        """The digest of the shard of each rank after each step."""
        return self._agreed("digest", lambda event: (event["step"], event["rank"]))

    def _agreed(self, name: str, key: Callable[[dict[str, Any]], Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for group in self.groups.values():
            for event in group.lines:
                if event["event"] == "committed":
                    known = found.setdefault(key(event), event[name])
                    assert known == event[name], f"step {event['step']} was committed twice\n{self.report()}"
        return found

    def faults(self) -> int:
        return sum(event["event"] == "fault" for group in self.groups.values() for event in group.lines)


def told(ends: list[dict[str, Any]]) -> list[Any]:
    return [{key: one[key] for key in ("rank", "step", "digest", "lr", "scale", "random")} for one in ends]


async def undisturbed(members: int, **settings: Any) -> tuple[list[Any], dict[tuple[int, int], str]]:
    async with OneCopyJob(min_replicas=members) as job:
        ends = await job.train(members, **settings)
        return told(ends), job.shards()


async def test_kills_in_every_phase_leave_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    steps = 16
    expected, shards = await undisturbed(3, steps=steps)
    faults = "2:1:forward,4:0:backward,6:2:copy,8:1:vote,10:0:committed,12:2:forward,12:2:reading"
    async with OneCopyJob(min_replicas=3) as job:
        ends = await job.train(3, 1, faults=faults, steps=steps)
        assert job.faults() == 7, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_rank_that_dies_in_a_recovery_is_rebuilt_too_with_two_copies() -> None:
    expected, shards = await undisturbed(3, steps=6, copies=2)
    async with OneCopyJob(min_replicas=3) as job:
        ends = await job.train(3, 1, faults="2:1:backward,2:0:serving", steps=6, copies=2)
        assert job.faults() == 2, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_job_without_spares_shrinks_and_grows_without_a_lost_step() -> None:
    async with OneCopyJob(min_replicas=4) as job:
        await job.train(4, kind="clip", steps=10)
        losses = job.losses()
    async with OneCopyJob("--initial-replicas", "4", min_replicas=3) as job:
        await job.train(4, kind="clip", faults="3:1:backward,7:2:vote", steps=10)
        assert job.faults() == 2, job.report()
        assert job.losses() == pytest.approx(losses, rel=1e-5)
        assert {event["world"] for event in job.groups["m0"].lines if event["event"] == "committed"} == {3, 4}


@pytest.mark.parametrize("kind", ["scaler", "lion", "tensor lr"])
async def test_all_kinds_of_steps_are_repeated_bit_for_bit(kind: str) -> None:
    """A ``GradScaler`` with an overflow in one rank, an optimizer that cannot be replayed, options that are tensors."""
    expected, shards = await undisturbed(3, kind=kind, steps=7)
    async with OneCopyJob(min_replicas=3) as job:
        ends = await job.train(3, 1, kind=kind, faults="2:2:vote,5:0:committed", steps=7)
        assert job.faults() == 2, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()
        if kind == "scaler":
            assert {one["scale"] for one in ends} == {2.0**16}, "one overflow halves it, and three steps double it"


async def test_two_dimensions_survive_the_loss_of_a_member_of_two_ranks() -> None:
    expected, shards = await undisturbed(2, ranks=2, kind="tensor parallel", steps=6)
    async with OneCopyJob(min_replicas=2) as job:
        ends = await job.train(2, 1, ranks=2, kind="tensor parallel", faults="2:2:backward", steps=6)
        assert job.faults() == 1, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_frozen_rank_disturbs_nothing_and_joins_again_when_it_goes_on() -> None:
    async with OneCopyJob(min_replicas=3) as job:
        await job.train(3, kind="clip", steps=10)
        shards, losses = job.shards(), job.losses()
    async with OneCopyJob("--heartbeat-timeout", "2", min_replicas=3) as job:
        thaw = asyncio.create_task(job.thaw_when_step_is(6))
        await job.train(3, 1, kind="clip", faults="2:1:freeze", steps=10)
        await thaw
        assert {key: value for key, value in job.shards().items() if key[0] <= 6}.items() <= shards.items()
        assert job.losses() == pytest.approx(losses, rel=1e-5), "it may be a fourth member from then on"
