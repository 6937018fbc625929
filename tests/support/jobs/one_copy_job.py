"""A job with one copy whose members kill or freeze themselves where the test says."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from tests.support.jobs.job import Group, Job
from tests.support.jobs.spares import with_spares

SECONDS = 120.0


class OneCopyJob(Job):
    seconds = SECONDS
    """Limit of ``train``."""

    def check_history(self) -> None:
        """The step logs of a Manager do not exist in such a job."""

    def variables(
        self, members: int, spares: int = 0, *, kind: str = "plain", faults: str = "", **more: Any
    ) -> dict[str, Any]:
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

        async with asyncio.timeout(self.seconds):
            while len(done()) < members * ranks:
                await self.until(lambda: len(done()) >= members * ranks or ended(), "an end", self.seconds)
                for name in ended():
                    group = self.groups[name]
                    codes = [one.exit_code for one in group.ranks]
                    if not any(event["event"] == "finished" and self._own(group, event) for event in group.lines):
                        assert -signal.SIGKILL in codes, f"{name} {codes}\n{self.report()}"
                        await self.start(name, ranks=ranks, **variables)
            for name in names:
                last = await self.groups[name].exit_codes()
                assert set(last) <= {0, 75}, f"{name}: {last}\n{self.report()}"
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

    async def until_asking(self, enough: Callable[[set[str]], bool]) -> None:
        """Wait until ``enough`` is true of the names of the groups whose requests the lighthouse has."""
        async with asyncio.timeout(SECONDS):
            while True:
                groups = (await self.order("GET", "/replicas"))["replicas"]
                if enough({one["name"] for one in groups if one["state"] in ("asking", "spare")}):
                    return
                await asyncio.sleep(0.05)  # a state of the lighthouse, which no member prints

    async def go_on_with_all(self, members: int, step: int) -> None:
        """Let the members that wait after ``step`` (``holds``) go on, when all others ask for a quorum."""
        await self.until(lambda: step in self.losses(), f"step {step}", SECONDS)
        committed = [event for group in self.groups.values() for event in group.lines if event["event"] == "committed"]
        waiting = next(event["world"] for event in committed if event["step"] == step)
        await self.until_asking(lambda names: len(names) == members - waiting)
        (self.directory / f"go.{step}").touch()

    def losses(self) -> dict[int, float]:
        """The loss of each committed step, which all ranks agree on."""
        return self._agreed("loss", lambda event: event["step"])

    def shards(self) -> dict[tuple[int, int], str]:
        """The digest of the shard of each rank after each step."""
        return self._agreed("digest", lambda event: (event["step"], event["rank"]))

    def samples(self) -> dict[int, list[int]]:
        """The samples of each committed step, of all ranks, sorted."""
        found: dict[int, list[int]] = {}
        for (step, _), own in self._agreed("samples", lambda event: (event["step"], event["rank"])).items():
            found.setdefault(step, []).extend(own)
        return {step: sorted(one) for step, one in found.items()}

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


def with_a_spare(members: int) -> OneCopyJob:
    """Return a job in which no lost member is waited for at the end, since a spare has its seat."""
    return OneCopyJob("--finish-grace", "0", min_replicas=members)


def told(ends: list[dict[str, Any]]) -> list[Any]:
    """Return the part of final states that two jobs must have in common."""
    return [{key: one[key] for key in ("rank", "step", "digest", "lr", "scale", "random")} for one in ends]


Known = dict[tuple[Any, ...], tuple[list[Any], dict[tuple[int, int], str], dict[int, float]]]
_known: Known = {}


async def undisturbed(members: int, **settings: Any) -> tuple[list[Any], dict[tuple[int, int], str], dict[int, float]]:
    """Return ends, shards and losses of a job without faults. It runs once in a process."""
    key = (members, *sorted(settings.items()))
    if key not in _known:
        async with OneCopyJob(min_replicas=members) as job:
            ends = await job.train(members, **settings)
            _known[key] = told(ends), job.shards(), job.losses()
    return _known[key]
