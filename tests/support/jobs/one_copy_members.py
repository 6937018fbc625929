"""Processes of members of a job with one copy, and the lighthouse of their job in the process of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep_chaos.histories.reading import check_files
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.quorum.events import PolicyOrdered
from keepstep_lighthouse.quorum.views.replicas import ReplicaView
from tests.support.jobs.spares import with_spares
from tests.support.network.ports import free_port
from tests.support.services.lighthouse_driver import lighthouse as in_loop

SCRIPT = Path(__file__).with_name("one_copy_member.py")
SECONDS = 120.0


class Members:
    """Processes of members, and the lighthouse of their job."""

    def __init__(self, lighthouse: Lighthouse, folder: Path) -> None:
        self.lighthouse, self.folder = lighthouse, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        *names: str,
        count: int,
        spares: int = 0,
        ranks: int = 1,
        arguments: tuple[str, ...] = (str(SCRIPT),),
        **variables: str,
    ) -> None:
        for name in names:
            port = str(free_port())
            for rank in range(ranks):
                environment = {
                    **os.environ,
                    "KEEPSTEP_LIGHTHOUSE": self.lighthouse.address,
                    "REPLICA_GROUP_ID": name,
                    "STOP": str(self.folder / "stop"),
                    **with_spares(count, spares),
                    "KEEPSTEP_STEP_LOG": str(self.folder / f"{name}.jsonl"),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    **variables,
                }
                key = f"{name}.{rank}" if rank else name
                with (self.folder / f"{key}.out").open("wb") as out:
                    self.processes[key] = subprocess.Popen(
                        [sys.executable, *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT
                    )

    def ranks_of(self, name: str) -> list[subprocess.Popen[bytes]]:
        """Return the processes of a member."""
        return [one for key, one in self.processes.items() if key.partition(".")[0] == name]

    def terminate(self, *names: str) -> None:
        """Send SIGTERM to all ranks of these members."""
        for one in [one for name in names for one in self.ranks_of(name)]:
            one.send_signal(signal.SIGTERM)

    def text(self, name: str) -> str:
        """Return what a member has printed."""
        return (self.folder / f"{name}.out").read_text()

    def output(self) -> str:
        return "\n".join(f"--- {one}\n{self.text(one)[-3000:]}" for one in self.processes)

    async def until(self, condition: Any, what: str) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                while not condition():  # noqa: ASYNC110  other processes make it true
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {what}\n{self.output()}") from None

    @property
    def core(self) -> Any:
        return self.lighthouse.jobs["default"].core

    def views(self) -> dict[str, ReplicaView]:
        if "default" not in self.lighthouse.jobs:
            return {}
        return {one.name: one for one in self.core.replicas(0.0) if one.member and one.shards is not None}

    def asks(self, name: str) -> bool:
        """Return whether all ranks of a member ask for a quorum."""
        return any(one.name == name and one.request is not None for one in self.core._groups)

    def seats(self) -> dict[int, str]:
        """Return the name of the member in each seat. The next one keeps its copies."""
        return {one.shards.seat: name for name, one in self.views().items() if one.shards is not None}

    def events(self, *kinds: str) -> list[Any]:
        return [one for one in self.lighthouse.events.newest("default", 500) if one.kind in kinds]

    def steps(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(name).splitlines() if line.startswith('{"step"')]

    async def trains(self, *names: str) -> None:
        """Wait until exactly these members have committed steps together."""
        await self.until(lambda: sorted(self.views()) == sorted(names), f"members {names}")
        before = {name: len(self.steps(name)) for name in names}
        await self.until(lambda: all(len(self.steps(one)) > before[one] + 2 for one in names), f"steps of {names}")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    async def code(self, name: str) -> int:
        """Return the exit code of all ranks of a member, when they have ended."""
        own = self.ranks_of(name)
        await self.until(lambda: all(one.poll() is not None for one in own), f"the end of {name}")
        codes = [one.wait() for one in own]
        assert len(set(codes)) == 1, f"ranks of {name} end with {codes}\n{self.output()}"
        return codes[0]

    async def order(self, event: Any) -> None:
        """Give an order, as over REST."""
        await self.lighthouse.jobs["default"].order(event)

    async def change_policy(self, **changes: Any) -> None:
        """Change the policy of the job."""
        await self.order(PolicyOrdered(replace(self.core.record.policy, **changes), "test"))

    async def finish(self, *names: str) -> None:
        """Let the members finish. The step logs must show that no step was lost or taken twice."""
        await self.change_policy(finish_grace=0.0)  # no lost member comes back
        (self.folder / "stop").touch()
        assert [await self.code(name) for name in names] == [0] * len(names), self.output()
        report = check_files(sorted(self.folder.glob("*.jsonl")))
        assert not report.violations, report.violations
        assert not self.events("went_back", "shards_lost")


@contextlib.asynccontextmanager
async def members(folder: Path) -> AsyncIterator[Members]:
    async with in_loop() as lighthouse:
        one = Members(lighthouse, folder)
        try:
            yield one
        finally:
            for process in one.processes.values():
                process.kill()
                process.wait()
