"""Run the faults of a schedule against a job: look, decide, inject, ten times a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from click import ClickException

from keepstep_chaos.injecting.elsewhere import Templates
from keepstep_chaos.injecting.injection import InjectionError, Injector
from keepstep_chaos.observing.observation import Observer
from keepstep_chaos.observing.resources import Resources
from keepstep_chaos.observing.targets import Places, addresses_of, group_of
from keepstep_chaos.recovery import Recovery
from keepstep_chaos.schedule import Schedule
from keepstep_chaos.vocabulary import Fault, Role, Target
from keepstep_cli.asking.rest import Lighthouse

CHAOS_LOOK_SECONDS = 0.1
SLOW_LOOK_SECONDS = 1.0
"""Between two samples of resources, and two questions to the lighthouse."""
CHAOS_ANSWER_SECONDS = 2.0
"""Maximum wait for the answer of a service."""
CHAOS_SETTLE_SECONDS = 60.0
"""Maximum wait at the end, until all faults are over."""
STUCK_WEDGES = 5
"""A target that has not recovered after so many times ``Duration.wedge_seconds`` ends the run."""
SERVICES = frozenset(Role) - {Role.GROUP, Role.JOB}


@dataclass(frozen=True, slots=True)
class Duration:
    """When a run ends: after ``seconds``, or after ``faults`` faults, whichever comes first; 0: no limit."""

    seconds: float
    faults: int
    wedge_seconds: float
    """No commit for this time, while enough targets are able: the job is wedged."""


class Engine:
    """One run. ``say``: receives a line for each fault."""

    def __init__(
        self,
        places: Places,
        schedule: Schedule,
        recovery: Recovery,
        lighthouse: Lighthouse,
        logs: list[Path],
        folder: Path,
        say: Callable[[str], None],
        templates: Templates | None = None,
    ) -> None:
        self._places = places
        self._schedule = schedule
        self._recovery = recovery
        self._lighthouse = lighthouse
        self._injector = Injector(places, lighthouse, folder, templates)
        self.observer = Observer(places.job, places, recovery, logs)
        self.resources = Resources()
        self._elsewhere = templates is not None
        self._say = say
        self._acts: set[asyncio.Task[None]] = set()
        self.wedged = False
        self._after: int | None = None
        """Number of the last event that was asked for."""

    async def run(self, duration: Duration) -> None:
        """Inject faults until the end, then wait until all targets have recovered. Leaves no fault behind."""
        with contextlib.suppress(ClickException):
            await self._ask_events()  # events from before do not count
        self._recovery.unseen = await self._unreachable()
        asking = [asyncio.create_task(one) for one in (self._ask_services(), self._look_slowly())]
        end = time.time() + duration.seconds if duration.seconds else float("inf")
        try:
            while time.time() < end and not self._finished(duration) and not self._look(duration):
                fault = self._schedule.next(time.time(), self._recovery.down)
                if fault is not None:
                    act = asyncio.create_task(self._act(fault))
                    self._acts.add(act)
                    act.add_done_callback(self._acts.discard)
                await asyncio.sleep(CHAOS_LOOK_SECONDS)
            if self._acts:
                await asyncio.wait(self._acts, timeout=CHAOS_SETTLE_SECONDS)
            settled = time.time() + STUCK_WEDGES * duration.wedge_seconds
            while self._recovery.down and time.time() < settled and not self._look(duration):  # noqa: ASYNC110 - as above
                await asyncio.sleep(CHAOS_LOOK_SECONDS)
        finally:
            tasks = [*self._acts, *asking]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._start_ended()
            self._injector.close()

    def _finished(self, duration: Duration) -> bool:
        return bool(duration.faults) and len(self._recovery.costs) >= duration.faults

    def _look(self, duration: Duration) -> bool:
        """Read the logs and the processes; return whether the job is wedged, or a target will not recover."""
        self.observer.look()
        quiet = self._recovery.wedged_seconds(time.time(), self._places.alive(self._recovery.down))
        self.wedged = self.wedged or quiet > duration.wedge_seconds
        return self.wedged or bool(self._recovery.stuck(time.time(), STUCK_WEDGES * duration.wedge_seconds))

    async def _act(self, fault: Fault) -> None:
        self._recovery.begin(fault, time.time())
        why = "interrupted"
        try:
            await self._injector.inject(fault)
            why = ""
        except InjectionError as error:
            why = str(error)
        finally:
            self._recovery.end(fault, time.time(), why)
            self._say(f"{fault.number:5} {fault}" + (f": not injected: {why}" if why else ""))

    # ---- services and resources

    async def _unreachable(self) -> frozenset[Target]:
        """Return the services elsewhere that do not answer this machine before the first fault."""
        places = [one for target, one in self._places.by_target.items() if one.elsewhere and target.role in SERVICES]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CHAOS_ANSWER_SECONDS)) as http:
            answered = await asyncio.gather(*(_answers(http, one.url) for one in places))
        return frozenset(one.target for one, answer in zip(places, answered, strict=True) if not answer)

    async def _ask_services(self) -> None:
        """Ask services that were hit until they answer."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CHAOS_ANSWER_SECONDS)) as http:
            while True:
                waiting = [target for role in SERVICES for target in self._recovery.waits_for(role)]
                for target in waiting:
                    asked = time.time()
                    if await _answers(http, self._places.by_target[target].url):
                        self._recovery.works(target, asked)
                await asyncio.sleep(CHAOS_LOOK_SECONDS)

    async def _look_slowly(self) -> None:
        while True:
            self._places.refresh()
            self._start_ended(self._recovery.acting)
            self.resources.sample(self._places, time.time(), self._recovery.down)
            with contextlib.suppress(ClickException):
                if self._elsewhere or not self.observer.steps_seen or self._recovery.waits_for(Role.GROUP):
                    asked = time.time()
                    self.learn(await self._lighthouse.get("jobs", self._places.job, "replicas"), asked)
                if not self.observer.events_seen:
                    await self._ask_events()
            await asyncio.sleep(SLOW_LOOK_SECONDS)

    def _start_ended(self, acting: Collection[Target] = ()) -> None:
        for line in self._injector.start_ended(acting):
            self._say(f"      {line}")

    async def _ask_events(self) -> None:
        """Take the events since the last call from the lighthouse, because no event log is at hand."""
        first, after = self._after is None, {} if self._after is None else {"after": self._after}
        found = await self._lighthouse.get("jobs", self._places.job, "events", **after)
        self._after = found["after"]
        for record in () if first else found["events"]:
            self.observer.event(record)

    def learn(self, answer: Any, asked: float) -> None:
        """Take from the lighthouse which groups stand by as spares and, without step logs, the commits.

        Args:
            answer: of the lighthouse, about all groups.
            asked: Unix time of the question.
        """
        for target, address in addresses_of(answer) if self._elsewhere else ():
            if target in self._places.by_target:
                self._places.by_target[target].url = address
        for replica in answer["replicas"]:
            group = group_of(self._places, replica["replica_id"])
            if group is None:
                continue
            if replica["state"] == "spare":  # it commits no step before it is needed
                self._recovery.works(group, asked)
            ago = replica.get("last_commit_seconds_ago")
            if ago is not None and not self.observer.steps_seen:
                self._recovery.committed(group, replica["step"], asked - ago)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a service answers, with any status. Certificates are not checked: no secret is sent."""
    try:
        async with http.get(f"{url}/healthz", ssl=False):
            return True
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
