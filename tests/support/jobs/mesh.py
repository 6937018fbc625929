"""A job under several lighthouses that share an etcd, with a network between them that can be cut."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import aiohttp

from keepstep_mesh.testing import ChaosProxy
from tests.support.jobs.job import DEADLINE, Group, Job
from tests.support.network.namespaces import LOOPBACK, Host, Namespaces
from tests.support.network.ports import free_port
from tests.support.services.etcd_server import EtcdCluster

LEASE = 3.0
FOLLOWER, WORKER = b"GET /v1/lighthouses/", b"GET /v1/jobs/"
"""The first bytes of connections to a lighthouse."""

Others = Literal["etcd", "lighthouses", "workers"]


class Mesh(Job):
    """``nodes``: lighthouses. ``lease``: seconds. ``environment``: variables of the lighthouses.

    With ``network`` each lighthouse, each group and etcd (which the caller starts on its host ``etcd``) has a host of
    its own there. Without, all are on loopback, each lighthouse reaches etcd through proxies of its own, and with
    ``proxied`` everybody reaches each lighthouse through a proxy.
    """

    def __init__(
        self,
        etcd: EtcdCluster,
        *flags: str,
        nodes: int = 2,
        proxied: bool = False,
        min_replicas: int = 1,
        lease: float = LEASE,
        network: Namespaces | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("--lease", str(lease), *flags, min_replicas=min_replicas)
        self.lighthouses: list[asyncio.subprocess.Process] = []
        self._network = network
        self._environment = environment
        self._prefix = uuid.uuid4().hex
        self._hosts = [network.host(f"lighthouse-{one}") if network else LOOPBACK for one in range(nodes)]
        self._ports = [free_port() for _ in range(nodes)]
        self.addresses = [f"http://{host.address}:{port}" for host, port in zip(self._hosts, self._ports, strict=True)]
        """Addresses at which the test reaches them."""
        self.address = ",".join(self.addresses)
        self._etcd = etcd.address.removeprefix("etcd://").split(",")
        self._to_etcd: list[list[ChaosProxy]] = []
        self._to_lighthouses: list[ChaosProxy] = []
        if network is None:
            self._to_etcd = [[ChaosProxy(*_host_and_port(one)) for one in self._etcd] for _ in range(nodes)]
            self._to_lighthouses = [ChaosProxy.before(one) for one in self.addresses] if proxied else []
        self._proxies = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for proxy in self._all_proxies():
            await self._proxies.enter_async_context(proxy)
        if self._to_lighthouses:
            self.address = ",".join(proxy.url for proxy in self._to_lighthouses)
        for number in range(len(self.addresses)):
            self.lighthouses.append(await self.start_node(number))
            await self.leader()  # the first leads
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for group in self.groups.values():
            group.kill()
        for number in range(len(self.lighthouses)):
            await self.signal_node(number, signal.SIGCONT)
            await self.stop_node(number, signal.SIGKILL)
        await self._proxies.aclose()
        await super().__aexit__(kind, error, trace)

    @property
    def rest_address(self) -> str:
        return self.addresses[0]  # a standby forwards requests to the leader

    def host_of(self, group: str) -> Host:
        return self._network.host(f"group-{group}") if self._network else LOOPBACK

    # ---- lighthouses

    async def start_node(self, number: int, environment: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
        host = self._hosts[number]
        etcd = (
            ",".join(f"127.0.0.1:{one.port}" for one in self._to_etcd[number])
            if self._to_etcd
            else ",".join(self._etcd)
        )
        command = ["--bind", f"{host.address}:{self._ports[number]}", "--store", f"etcd://{etcd}/{self._prefix}"]
        command += ["--min-replicas", str(self._min_replicas), "--insecure"]
        command += ["--event-log", str(self.logs / f"events-{number}.jsonl"), *self._flags]
        if self._to_lighthouses:
            command += ["--advertise", self._to_lighthouses[number].url]
        with (self.directory / "lighthouse.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(*host.command, sys.executable, "-m", "keepstep_cli", "lighthouse", *command),
                env={**os.environ, **(environment or self._environment or {})},
                stdout=log,
                stderr=log,
            )

    async def restart_node(self, number: int, environment: Mapping[str, str] | None = None) -> None:
        self.lighthouses[number] = await self.start_node(number, environment)

    async def signal_node(self, number: int, what: int) -> None:
        if self.lighthouses[number].returncode is None:
            os.kill(self.lighthouses[number].pid, what)

    async def stop_node(self, number: int, what: int = signal.SIGKILL) -> int:
        """Signal a lighthouse and return its exit code."""
        await self.signal_node(number, what)
        async with asyncio.timeout(DEADLINE):
            return await self.lighthouses[number].wait()

    async def leader(self, *, followed: bool = False, but: int = -1) -> int:
        """Poll all lighthouses until one leads; return its number.

        ``followed``: until it has standbys too. ``but``: not this one.
        """
        wanted = ["keepstep_lighthouse_ready 1.0"]
        if followed:
            wanted.append(f"keepstep_lighthouse_standbys {len(self.addresses) - 1}.0")

        async def leads(http: aiohttp.ClientSession, number: int) -> bool:
            metrics = await _get(http, f"{self.addresses[number]}/metrics")
            return all(f"\n{one}\n" in metrics for one in wanted)

        return await self._first(set(range(len(self.addresses))) - {but}, leads, "a lighthouse leads")

    async def not_ready(self, number: int, why: str) -> None:
        """Wait until lighthouse ``number`` gives this reason why it is not ready."""

        async def says_so(http: aiohttp.ClientSession, number: int) -> bool:
            return why in await _get(http, f"{self.addresses[number]}/readyz")

        await self._first({number}, says_so, f"lighthouse {number} is not ready: {why}")

    async def succeeded(self, leader: int) -> int:
        """Wait until another lighthouse than ``leader`` leads; return its number."""
        return await self.leader(but=leader)

    async def _first(
        self, numbers: set[int], holds: Callable[[aiohttp.ClientSession, int], Awaitable[bool]], what: str
    ) -> int:
        """Ask these lighthouses, one after the other, until ``holds`` is true of one; return its number."""
        try:
            async with asyncio.timeout(DEADLINE), aiohttp.ClientSession() as http:
                while True:
                    for number in numbers:
                        if await holds(http, number):
                            return number
                    await asyncio.sleep(0.02)  # no event says so
        except TimeoutError:
            codes = [one.returncode for one in self.lighthouses]
            told = f"not seen within {DEADLINE:g} s: {what}; exit codes of the lighthouses: {codes}"
            raise AssertionError(f"{told}\n{self.report()}") from None

    # ---- the network

    def cut(self, number: int, others: Others) -> None:
        """Cut the network between lighthouse ``number`` and these, until ``mend``."""
        if self._network is not None:
            for other in self._named(others, but=number):
                self._network.cut(f"lighthouse-{number}", other)
        elif others == "etcd":
            for proxy in self._to_etcd[number]:
                proxy.freeze()
        else:
            self._to_lighthouses[number].refuse(only=WORKER if others == "workers" else FOLLOWER)

    def cut_sessions(self) -> None:
        """Close the sessions of all groups, which reconnect. It needs ``proxied``, and no ``network``."""
        for proxy in self._to_lighthouses:
            proxy.cut(only=WORKER)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of this kind in the event logs of all lighthouses, those of one lighthouse in order."""
        logs = sorted(self.logs.glob("events-*.jsonl"))
        found = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        return [event for event in found if event["kind"] == kind]

    def isolate(self, group: Group) -> None:
        """Cut the network between the group and all others, until ``mend``. It needs a ``network``."""
        assert self._network is not None
        for other in ("etcd", *self._named("lighthouses"), *self._named("workers")):
            if other != f"group-{group.name}":
                self._network.cut(f"group-{group.name}", other)

    def part(self, one: Group, other: Group) -> None:
        """Cut the network between these two groups, until ``mend``. It needs a ``network``."""
        assert self._network is not None
        self._network.cut(f"group-{one.name}", f"group-{other.name}")

    def drop(self, source: Group, target: Group) -> None:
        """Drop what one group sends to the other, until ``mend``. It needs a ``network``."""
        assert self._network is not None
        self._network.drop(f"group-{source.name}", f"group-{target.name}")

    def mend(self) -> None:
        if self._network is not None:
            self._network.mend()
        for proxy in self._all_proxies():
            proxy.thaw()
            proxy.accept()

    def _named(self, others: Others, but: int | None = None) -> list[str]:
        match others:
            case "etcd":
                return ["etcd"]
            case "lighthouses":
                return [f"lighthouse-{one}" for one in range(len(self.addresses)) if one != but]
            case "workers":
                return [f"group-{name}" for name in self.groups]

    def _all_proxies(self) -> Iterator[ChaosProxy]:
        yield from self._to_lighthouses
        for several in self._to_etcd:
            yield from several


async def _get(http: aiohttp.ClientSession, url: str) -> str:
    """Return the body, or an empty text without an answer."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(1)) as answer:
            return await answer.text()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return ""


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
