"""Backup and restore with the commands of docs/deploy.md: a real etcd, real services, and real trainers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import pytest

from tests.support.jobs.job import DEADLINE, Group, Job
from tests.support.jobs.mesh import LEASE
from tests.support.network.ports import free_ports
from tests.support.services.etcd_server import BINARY, EtcdNode
from tests.support.services.metrics_driver import client, metrics_process
from tests.support.services.relay_driver import relay_process

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

EVERY = 10
"""Steps between two durable checkpoints."""
STEP = re.compile(r"step (\d+) batch \d+ loss (.*)")


def documented(page: Path, heading: str) -> list[str]:
    """Return the commands of a section."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]


def losses(group: Group) -> dict[int, str]:
    """Map the steps that the group printed to their losses, with all digits."""
    return {int(found[1]): found[2] for line in group.output if (found := STEP.match(line))}


def step(*groups: Group) -> int:
    """Return the last step that all groups printed."""
    last = (next((line for line in reversed(group.output) if STEP.match(line)), "step 0") for group in groups)
    return min(int(line.split()[1]) for line in last)


class OneMachine(Job):
    """A job of two groups, an etcd, a lighthouse, a relay, and a metrics service, with all data in one folder."""

    def __init__(self) -> None:
        client_port, peer_port = free_ports(2)
        waits = ("--lease", str(LEASE), "--takeover-grace", "1")  # of the lighthouse after the restore
        super().__init__("--store", f"etcd://127.0.0.1:{client_port}", *waits, min_replicas=2)
        self.data = self.directory / "data"
        self.etcd = EtcdNode("etcd", self.data, client_port, peer_port)
        self.metrics: tuple[asyncio.subprocess.Process, str]
        self._services = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.start_services()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.kill_all()
        await super().__aexit__(kind, error, trace)

    async def start_services(self) -> None:
        self.data.mkdir(exist_ok=True)
        self.etcd.start()
        self.etcd.wait()
        await self.start_lighthouse()
        flags = ("--name", "vault", "--lighthouse", self.address, "--data-dir", str(self.data / "relay"))
        await self._services.enter_async_context(relay_process(*flags))
        await self._start_metrics()

    async def _start_metrics(self) -> None:
        flags = ("--lighthouse", self.address, "--data-dir", str(self.data / "metrics"))
        self.metrics = await self._services.enter_async_context(metrics_process(*flags))

    async def events(self) -> set[str]:
        """Return the kinds of events that the metrics service has."""
        async with client(self.metrics[1]) as asking:
            return {event["event"] for event in (await asking.get("events", "default"))["events"]}

    async def kill_all(self) -> None:
        for group in self.groups.values():
            group.kill()
        await self.stop_lighthouse(signal.SIGKILL)
        await self._services.aclose()
        self.etcd.kill()

    async def train(self, script: Path) -> tuple[Group, Group]:
        environment = {"SCRIPTS": str(script), "STEPS": "1000000", "EVERY": str(EVERY), "NUM_REPLICA_GROUPS": "2"}
        a, b = [await self.start(name, **environment) for name in ("a", "b")]
        return a, b

    async def run(self, command: str) -> None:
        """Run a command of the documentation, with the addresses and folders of this machine."""
        if command.startswith("systemctl stop"):
            self.metrics[0].terminate()
            await self.metrics[0].wait()
        elif command.startswith("systemctl start"):
            await self._start_metrics()
        else:
            command = command.replace("/var/lib/keepstep", str(self.data))
            command = command.replace("http://e1:2379", f"http://127.0.0.1:{self.etcd.port}")
            shell = await asyncio.create_subprocess_exec(
                *("bash", "-c", command),
                cwd=self.directory,
                env={"PATH": f"{BINARY.parent}{os.pathsep}{os.environ['PATH']}"},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await shell.communicate()
            assert shell.returncode == 0, f"{command}\n{output.decode()}"


async def test_a_job_goes_on_from_the_documented_backup_of_a_mesh_that_lost_all_data(repository: Path) -> None:
    """It takes long because it starts etcd, three services, and two trainers twice."""
    page, script = repository / "docs" / "deploy.md", repository / "examples" / "durable.py"
    async with OneMachine() as machine:
        a, b = await machine.train(script)
        await machine.until(lambda: step(a, b) > 3 * EVERY, "a step waits until the last checkpoint but one is there")
        await machine.order("PATCH", "", max_replicas=7)
        async with asyncio.timeout(DEADLINE):
            while "policy" not in await machine.events():  # noqa: ASYNC110 - the service pushes nothing to this test
                await asyncio.sleep(0.05)
        for command in documented(page, "Back up"):
            await machine.run(command)
        saved = max(step(a), step(b))
        await machine.until(lambda: step(a, b) > saved + 2 * EVERY, "training goes on after the backup")
        await machine.kill_all()
        before = losses(a), losses(b)
        shutil.rmtree(machine.data)

        for command in documented(page, "Restore"):
            await machine.run(command)
        await machine.start_services()
        for group in (a, b):
            await group.gone()
            group.output.clear()
        a, b = await machine.train(script)
        await machine.until(lambda: step(a, b) > saved + EVERY, "training goes on after the restore")
        (resumed,) = {int(line.split()[-1]) for one in (a, b) for line in one.output if line.startswith("resumed")}
        assert 0 < resumed <= saved
        for then, now in zip(before, (losses(a), losses(b)), strict=True):
            both = now.keys() & then.keys()
            assert min(now) == resumed + 1
            assert len(both) > EVERY
            assert {one: now[one] for one in both} == {one: then[one] for one in both}, "the weights differ"
        assert (await machine.order("GET", ""))["policy"]["max_replicas"] == 7
        assert "policy" in await machine.events(), "the events before the backup are lost"
