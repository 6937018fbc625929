"""The fault runs: each does one thing to a job that trains, again and again, and notes how long no step was committed.

Two lighthouses with their default times share a real etcd; each group is a process that trains. After each fault all
groups that nobody killed must commit ``STEPS_AFTER`` steps more. In the end nobody else may have exited, weights must
be bit-identical, and ``check-history`` must find no violation in the logs of all.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from tests.faults.outcome import Limit, Outcome
from tests.support.jobs.job import DEADLINE, Group, discarded
from tests.support.jobs.mesh import Mesh, Others
from tests.support.network import namespaces
from tests.support.network.namespaces import Namespaces
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.relay_driver import metric, relay_process

LEASE = 10.0
"""The default of ``--lease``, as the other times of the lighthouses are theirs."""
HEARTBEAT_TIMEOUT = 5.0
"""The default too."""
STEPS_AFTER = 100
FROZEN_SECONDS = 30.0
PARTED_SECONDS = 20.0
"""Less than the collectives' timeout of ``trainer.py``."""
MEMBERS_CHANGE_EVERY = 5
"""Kills of the leader; so that quorums are made under many leaders."""
TURN_SECONDS = 300.0
SEVERAL_CHUNKS = {"TRAINER_WIDTH": "12000"}
"""10 MiB of state."""
SETTLING_HEALS = 20
"""After which a trainer needs nothing more for another heal, but for ``MAX_GROWTH_BYTES``."""
MAX_GROWTH_BYTES = 128 << 20


class Run:
    """One row at work. ``say`` is told of each time; ``keep``: where its logs are to be kept."""

    def __init__(self, row: Row, times: int, *, proxies: bool, say: Callable[[str], None], keep: Path | None) -> None:
        self.outcome = Outcome(row.name, row.what, times, row.limit, row.holds)
        self._row = row
        self._proxies = proxies
        self._say = say
        self._keep = keep

    async def play(self) -> Outcome:
        """Never raises for what the row does: that is a broken promise."""
        began = time.monotonic()
        try:
            await self._row.play(self)
        except Exception as error:  # noqa: BLE001 - the other rows are to run too
            first, *more = str(error).splitlines() or [""]
            self.outcome.broken.append(f"{type(error).__name__}: {first}")
            self._say("\n".join([*traceback.format_exception(error)[-2:], *more]))
        self.outcome.took = time.monotonic() - began
        self.outcome.judge()
        return self.outcome

    @asynccontextmanager
    async def mesh(
        self, *names: str, min_replicas: int = 1, nodes: int = 1, **trainer: str
    ) -> AsyncIterator[tuple[Mesh, list[Group]]]:
        """A job of these groups that trains; ``nodes``: of etcd; ``trainer``: variables of ``trainer.py``."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-faults-")))
            network = stack.enter_context(Namespaces()) if self._row.parts_hosts and not self._proxies else None
            if self._row.parts_hosts:
                self.outcome.network = "network namespaces" if network else "TCP proxies"
            host = network.host("etcd") if network else namespaces.LOOPBACK
            etcd = stack.enter_context(EtcdCluster(folder / "etcd", nodes, host=host))
            self.etcd = etcd
            mesh = Mesh(etcd, lease=LEASE, network=network, proxied=self._row.parts_hosts, min_replicas=min_replicas)
            try:
                async with mesh:
                    try:
                        groups = [await mesh.start(name, **trainer) for name in names]
                        await mesh.advance(*groups)
                        yield mesh, groups
                        self.outcome.exited = gone(mesh)
                        self.outcome.compared = mesh.assert_identical()
                    except Exception:
                        self.outcome.exited = gone(mesh, but=-signal.SIGKILL)  # that we may have sent
                        raise
                    finally:
                        self._keep_logs(mesh)
            finally:
                self.outcome.take(mesh.history)

    def _keep_logs(self, mesh: Mesh) -> None:
        if self._keep is not None:
            folder = self._keep / self._row.name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(mesh.directory, folder)
            (folder / "report.txt").write_text(mesh.report())

    @property
    def turns(self) -> range:
        return range(self.outcome.wanted)

    @asynccontextmanager
    async def gap(self, mesh: Mesh, *groups: Group) -> AsyncIterator[None]:
        """Around a fault: how long it kept these groups from committing."""
        since = time.time()
        async with asyncio.timeout(TURN_SECONDS):
            yield
            await mesh.advance(*groups, steps=STEPS_AFTER)
        self.note(max(group.longest_gap(since) for group in groups))

    def note(self, seconds: float) -> None:
        self.outcome.seconds.append(seconds)
        self._say(f"  {self._row.name} {len(self.outcome.seconds)}/{self.outcome.wanted}: {seconds:.3f} s")


def gone(mesh: Mesh, but: int | None = None) -> list[str]:
    """Groups of which a process has ended, with another code than ``but``."""
    codes = {group.name: {one.exit_code for one in group.ranks} - {None, but} for group in mesh.groups.values()}
    return sorted(name for name, ended in codes.items() if ended)


@dataclass(frozen=True, slots=True)
class Row:
    """``parts_hosts``: in network namespaces where there can be any, else through proxies."""

    name: str
    what: str
    times: int
    play: Callable[[Run], Awaitable[None]]
    limit: Limit | None = None
    holds: str = ""
    """What ``play`` makes sure of, beside what holds for all rows."""
    parts_hosts: bool = False
    namespaces_only: bool = False


# ---- the leader


async def _leader_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c", min_replicas=2) as (mesh, (a, b, c)):
        for turn in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                await mesh.stop_node(leader, signal.SIGKILL)
                await mesh.restart_node(leader)
            if turn % MEMBERS_CHANGE_EVERY == 0:
                c.kill()
                await mesh.advance(a, b)
            elif turn % MEMBERS_CHANGE_EVERY == 1:
                await mesh.start("c")
                await mesh.advance(a, b, c)
        if run.outcome.wanted % MEMBERS_CHANGE_EVERY == 1:
            await mesh.start("c")
            await mesh.advance(a, b, c)
    found = run.outcome
    assert found.epochs > found.wanted, f"{found.epochs} epochs after {found.wanted} leaders were killed"
    changes = found.wanted // MEMBERS_CHANGE_EVERY
    assert found.quorums > 2 * changes, f"{found.quorums} quorum_ids, and members changed {2 * changes} times"


async def _leader_stopped(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
        for _ in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                assert await mesh.stop_node(leader, signal.SIGTERM) == 0, "it ended badly"
                await mesh.restart_node(leader)
        assert not (lost := discarded(a, b)), f"a hand-over cost a step: {lost[0]}"


async def _leader_frozen(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
        for _ in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                await mesh.signal_node(leader, signal.SIGSTOP)
                thaw_at = time.monotonic() + FROZEN_SECONDS
                successor = await mesh.leader()
                assert successor != leader
                while time.monotonic() < thaw_at:
                    await mesh.advance(a, b)
                before = await _decided(mesh, successor)
                await mesh.signal_node(leader, signal.SIGCONT)
                await mesh.advance(a, b, steps=STEPS_AFTER)
            assert await mesh.leader(followed=True) == successor, "the frozen one leads again"
            assert await _decided(mesh, successor) == before, "the frozen one changed something"


async def _decided(mesh: Mesh, node: int) -> tuple[int, int]:
    """Epoch and quorum_id, as this lighthouse tells them."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE), raise_for_status=True) as http:
        async with http.get(f"{mesh.addresses[node]}/v1/cluster") as answer:
            epoch = (await answer.json())["epoch"]
        async with http.get(f"{mesh.addresses[node]}/v1/jobs/default/quorum") as answer:
            return epoch, (await answer.json())["quorum_id"]


def _leader_without(others: Others) -> Callable[[Run], Awaitable[None]]:
    async def play(run: Run) -> None:
        async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
            for _ in run.turns:
                leader = await mesh.leader(followed=True)
                async with run.gap(mesh, a, b):
                    mesh.cut(leader, others)
                    await mesh.succeeded(leader)
                    await mesh.advance(a, b)
                    mesh.mend()

    return play


async def _lighthouses_killed(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2) as (mesh, (a, b)):
        for _ in run.turns:
            await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                for number in (0, 1):
                    await mesh.stop_node(number, signal.SIGKILL)
                for number in (0, 1):
                    await mesh.restart_node(number)


# ---- etcd


async def _etcd_node_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c", min_replicas=2, nodes=3) as (mesh, (a, b, c)):
        for turn in run.turns:
            await mesh.leader(followed=True)
            node = run.etcd.nodes[turn % 3]
            async with run.gap(mesh, a, b):
                node.kill()
                c.kill()  # a change of members, which has to be written
            await mesh.start("c")
            await mesh.advance(a, b, c)
            node.start()
            await asyncio.to_thread(node.wait)


async def _etcd_majority_killed(run: Run) -> None:
    async with run.mesh("a", "b", min_replicas=2, nodes=3) as (mesh, (a, b)):
        for turn in run.turns:
            await mesh.leader(followed=True)
            first, second = [run.etcd.nodes[(turn + one) % 3] for one in (0, 1)]
            async with asyncio.timeout(TURN_SECONDS):
                first.kill()
                second.kill()
                await _stands_still(a, b)
                started = time.time()
                first.start()
                await mesh.advance(a, b, steps=STEPS_AFTER)
            run.note(_first_event_after(started, a, b) - started)
            second.start()
            await asyncio.to_thread(second.wait)


# ---- groups


async def _group_and_leader_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, (a, b, c)):
        for _ in run.turns:
            leader = await mesh.leader(followed=True)
            async with run.gap(mesh, a, b):
                c.kill()
                await mesh.stop_node(leader, signal.SIGKILL)
                await mesh.restart_node(leader)
            await mesh.start("c")
            await mesh.advance(a, b, c)


async def _group_killed(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with run.gap(mesh, *others):
                victim.kill()
            await mesh.start(victim.name)
            await mesh.advance(*groups)


async def _group_frozen(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with run.gap(mesh, *others):
                victim.kill(number=signal.SIGSTOP)
            victim.kill(number=signal.SIGCONT)
            await mesh.advance(*groups)


async def _group_isolated(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with run.gap(mesh, *others):
                mesh.isolate(victim)
            mesh.mend()
            await mesh.advance(*groups)


async def _groups_parted(run: Run) -> None:
    async with run.mesh("a", "b", "c") as (mesh, groups):
        for turn in run.turns:
            one, other = groups[turn % 3], groups[(turn + 1) % 3]
            async with asyncio.timeout(TURN_SECONDS):
                mesh.part(one, other)
                await asyncio.sleep(PARTED_SECONDS)  # how long they are parted is what the row is about
                mesh.mend()
                mended = time.time()
                await mesh.advance(*groups, steps=STEPS_AFTER)
            run.note(_first_event_after(mended, *groups) - mended)


# ---- relays


async def _relay_killed(run: Run) -> None:
    at = random.Random(1)
    async with run.mesh("a", "b", "c", **SEVERAL_CHUNKS) as (mesh, groups):
        for turn in run.turns:
            victim = groups[turn % 3]
            others = [group for group in groups if group is not victim]
            async with _relay(mesh) as (relay, _):
                victim.kill()
                await mesh.advance(*others)
                heals = _heals(mesh, victim)
                async with run.gap(mesh, *others):
                    await mesh.start(victim.name, **SEVERAL_CHUNKS)
                    await mesh.until(lambda group=victim: group.lines[-1]["event"] == "started", "it is up")
                    await asyncio.sleep(at.uniform(0.0, 0.3))  # any moment of the heal
                    relay.kill()
                    await mesh.advance(*groups, steps=1)
                assert _heals(mesh, victim) > heals, "it did not heal"


async def _healed_through_relay(run: Run) -> None:
    async with run.mesh("a", "b", "c", **SEVERAL_CHUNKS) as (mesh, groups), _relay(mesh) as (_, url):
        survivor, victim = psutil.Process(groups[0].ranks[0].pid), groups[2]
        settled: tuple[int, int, int] | None = None
        for turn in run.turns:
            sent = await metric(url, "sent_bytes_total")
            async with asyncio.timeout(TURN_SECONDS):
                victim.kill()
                await mesh.advance(*groups[:2], steps=1)
                since = time.time()
                await mesh.start(victim.name, **SEVERAL_CHUNKS)
                await mesh.advance(*groups, steps=1)
            run.note(max(group.longest_gap(since) for group in groups[:2]))
            assert await metric(url, "sent_bytes_total") > sent, "it did not heal through the relay"
            if turn == SETTLING_HEALS:
                settled = _held(survivor)
        if settled is not None:
            threads, descriptors, memory = _held(survivor)
            assert threads <= settled[0], f"{threads} threads, after {SETTLING_HEALS} heals {settled[0]}"
            assert descriptors <= settled[1], f"{descriptors} descriptors, after {SETTLING_HEALS} heals {settled[1]}"
            assert memory <= settled[2] + MAX_GROWTH_BYTES, f"{memory} bytes, after {SETTLING_HEALS} heals {settled[2]}"


@asynccontextmanager
async def _relay(mesh: Mesh) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """One that the groups know."""
    async with relay_process("--lighthouse", mesh.address) as (process, url):
        async with asyncio.timeout(DEADLINE):
            while not await metric(url, "registered"):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.02)
        yield process, url


def _heals(mesh: Mesh, group: Group) -> int:
    return (mesh.logs / f"{group.name}.jsonl").read_text().count('"healed"')


def _held(process: psutil.Process) -> tuple[int, int, int]:
    """Threads, descriptors, bytes."""
    return process.num_threads(), process.num_fds(), process.memory_info().rss


def _first_event_after(since: float, *groups: Group) -> float:
    return min(event["t"] for group in groups for event in group.lines if event["t"] > since)


async def _stands_still(*groups: Group) -> None:
    while time.time() - max(group.lines[-1]["t"] for group in groups) < HEARTBEAT_TIMEOUT:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


P95_1_S = Limit("p95", 1.0)
SILENCE = Limit("worst", HEARTBEAT_TIMEOUT + 0.5)

ROWS = {
    row.name: row
    for row in (
        Row(
            *("leader_killed", "the leader: SIGKILL", 50, _leader_killed, P95_1_S),
            holds="a new epoch each time, a new quorum_id with each change of members",
        ),
        Row(
            *("leader_stopped", "the leader: SIGTERM", 20, _leader_stopped, P95_1_S),
            holds="it exits 0, no step is discarded",
        ),
        Row(
            *("leader_frozen", "the leader: SIGSTOP for 30 s", 3, _leader_frozen),
            holds="another leads; when it goes on, epoch, quorum_id and leader stay",
        ),
        Row(
            *("leader_without_etcd", "the leader cut off from etcd", 3, _leader_without("etcd")),
            holds="another leads",
            parts_hosts=True,
        ),
        Row(
            *("leader_without_standby", "the leader cut off from the standby", 3, _leader_without("lighthouses")),
            holds="one leads",
            parts_hosts=True,
        ),
        Row(
            *("leader_without_workers", "the leader cut off from all workers", 3, _leader_without("workers")),
            holds="another leads",
            parts_hosts=True,
        ),
        Row(
            *("lighthouses_killed", "both lighthouses: SIGKILL, and started again", 5, _lighthouses_killed),
            holds="it goes on by itself",
        ),
        Row(
            *("etcd_node_killed", "1 of 3 etcd nodes and a group: SIGKILL", 5, _etcd_node_killed),
            holds="the change of members is written",
        ),
        Row(
            "etcd_majority_killed",
            "2 of 3 etcd nodes: SIGKILL until all stands still; from the start of one on",
            *(3, _etcd_majority_killed),
            holds="it goes on by itself",
        ),
        Row(
            *("group_and_leader_killed", "1 of 3 groups and the leader: SIGKILL", 5, _group_and_leader_killed),
            holds="it goes on without the group",
        ),
        Row(
            *("group_killed", "1 of 3 groups: SIGKILL", 20, _group_killed, Limit("p95", 0.5)),
            holds="it comes back equal",
        ),
        Row(
            *("relay_killed", "the relay: SIGKILL while 1 of 3 groups heals", 20, _relay_killed),
            holds="the group heals all the same",
        ),
        Row(
            *("healed_through_relay", "1 of 3 groups: SIGKILL; it heals through a relay", 200, _healed_through_relay),
            holds="a relay serves each heal; a source has no more threads, descriptors and memory than before",
        ),
        Row(
            *("group_frozen", "1 of 3 groups: SIGSTOP, and SIGCONT later", 3, _group_frozen, SILENCE),
            holds="it comes back equal",
        ),
        Row(
            *("group_isolated", "1 of 3 groups cut off from everything", 3, _group_isolated, SILENCE),
            holds="it comes back equal",
            parts_hosts=True,
            namespaces_only=True,
        ),
        Row(
            "groups_parted",
            "2 of 3 groups cut off from each other for 20 s; from the mending on",
            *(3, _groups_parted),
            holds="it goes on by itself",
            parts_hosts=True,
            namespaces_only=True,
        ),
    )
}


async def play(
    name: str, times: int = 0, *, proxies: bool = False, say: Callable[[str], None] = print, keep: Path | None = None
) -> Outcome:
    """One row. ``times``: 0 for as often as the table has it. ``proxies``: also where there could be namespaces."""
    row = ROWS[name]
    proxies = proxies or namespaces.why_not() is not None
    return await Run(row, times or row.times, proxies=proxies, say=say, keep=keep).play()
