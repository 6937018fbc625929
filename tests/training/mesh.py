"""A job under several lighthouses that share an etcd; each lighthouse reaches etcd through a proxy of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from etcd_server import EtcdCluster
from keepstep_mesh.testing import ChaosProxy

from .job import DEADLINE, Job, free_port

LEASE = 3.0


class Mesh(Job):
    """``nodes``: lighthouses. ``proxied``: others reach each lighthouse through a proxy; the trainers do not."""

    def __init__(
        self, etcd: EtcdCluster, *flags: str, nodes: int = 2, proxied: bool = False, min_replicas: int = 1
    ) -> None:
        super().__init__("--lease", str(LEASE), *flags, min_replicas=min_replicas)
        self.ports = [free_port() for _ in range(nodes)]
        self.addresses = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.address = ",".join(self.addresses)
        self.lighthouses: list[asyncio.subprocess.Process] = []
        self.to_etcd = [
            [ChaosProxy(*_host_and_port(one)) for one in etcd.address.removeprefix("etcd://").split(",")]
            for _ in range(nodes)
        ]
        self.to_each_other = [ChaosProxy("127.0.0.1", port) for port in self.ports] if proxied else []
        self._prefix = uuid.uuid4().hex

    async def __aenter__(self) -> Self:
        for proxy in (*self.to_each_other, *(one for several in self.to_etcd for one in several)):
            await proxy.__aenter__()
        for number in range(len(self.ports)):
            self.lighthouses.append(await self.start_node(number))
            await self.leader()  # the first leads
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for group in self.groups.values():
            group.kill()
        for number in range(len(self.lighthouses)):
            await self.signal_node(number, signal.SIGCONT)
            await self.stop_node(number, signal.SIGKILL)
        for proxy in (*self.to_each_other, *(one for several in self.to_etcd for one in several)):
            await proxy.__aexit__()
        await super().__aexit__(kind, error, trace)

    async def start_node(self, number: int) -> asyncio.subprocess.Process:
        etcd = ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.to_etcd[number])
        command = ["--bind", f"127.0.0.1:{self.ports[number]}", "--store", f"etcd://{etcd}/{self._prefix}"]
        command += ["--min-replicas", str(self._min_replicas)]
        command += ["--event-log", str(self.logs / f"events-{number}.jsonl"), *self._flags]
        if self.to_each_other:
            command += ["--advertise", self.to_each_other[number].url]
        with (self.directory / "lighthouse.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "keepstep_lighthouse", *command, stdout=log, stderr=log
            )

    async def restart_node(self, number: int) -> None:
        self.lighthouses[number] = await self.start_node(number)

    async def signal_node(self, number: int, what: int) -> None:
        if self.lighthouses[number].returncode is None:
            os.kill(self.lighthouses[number].pid, what)

    async def stop_node(self, number: int, what: int = signal.SIGKILL) -> int:
        """Its exit code."""
        await self.signal_node(number, what)
        async with asyncio.timeout(DEADLINE):
            return await self.lighthouses[number].wait()

    async def leader(self) -> int:
        """Which lighthouse leads, asked of each until one says that it does."""
        async with asyncio.timeout(DEADLINE), aiohttp.ClientSession() as http:
            while True:
                for number, address in enumerate(self.addresses):
                    if await _leads(http, address):
                        return number
                await asyncio.sleep(0.02)


async def _leads(http: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with http.get(f"{address}/metrics", timeout=aiohttp.ClientTimeout(1)) as answer:
            return "keepstep_lighthouse_ready 1" in await answer.text()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
