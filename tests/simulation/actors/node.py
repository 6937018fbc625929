"""A lighthouse process in virtual time: the real ``LighthouseNode`` and all its parts, on simulated wires."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from keepstep_lighthouse.jobs import event_log, job, lighthouse_node, sessions
from keepstep_lighthouse.jobs.event_log import EventLog, Happened
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.leadership import campaign, leader_link, nodes, term
from keepstep_lighthouse.leadership.campaign import LEADER_KEY
from keepstep_lighthouse.leadership.leader_link import PATH, LeaderLink
from keepstep_lighthouse.leadership.term import TermOverError
from keepstep_lighthouse.quorum.events import Announce, Event, LogEntry, ReplaceOrdered, Tell
from keepstep_lighthouse.registry import service_registry
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_lighthouse.store.contract import StoreError
from keepstep_mesh.net import websocket
from keepstep_mesh.net.websocket import UpgradeError
from keepstep_mesh.protocol.membership import Data
from tests.simulation.actors.ports import Ports
from tests.simulation.checks.history import EVENTS
from tests.simulation.virtual.network import Connection
from tests.simulation.virtual.process import ProcessClock, ProcessLoop, replaced
from tests.simulation.virtual.store import StoreClient
from tests.simulation.virtual.wires import IdentityOf, Socket, Wire

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

UPGRADE_SECONDS = 0.002
RESTART_SECONDS = 0.5
"""After a process could not begin."""


class Node:
    """One process of a lighthouse. After a restart, another ``Node`` has its address.

    Args:
        number: Of the process, different for each.
        rate: Of its clock.
        lease: Seconds; its ``--lease``.
        alone: No other lighthouse uses its store: it leads without an election.
    """

    def __init__(self, sim: Simulation, name: str, number: int, *, rate: float, lease: float, alone: bool) -> None:
        self.sim = sim
        self.name = name
        self.address = address_of(name)
        self.loop = ProcessLoop(sim.time, rate, sim.on_fault)  # type: ignore[abstract]  # only what services call
        self.sockets: dict[Socket, None] = {}
        self.store = StoreClient(sim.store, self.loop, sim.time, sim.random, exclusive=alone)
        settings = LighthouseSettings(store="shared://", policy=sim.policy, lease=lease)
        events = _Events(self, EVENTS if alone else f"{name}.jsonl")
        self.lighthouse = LighthouseNode(settings, self.store, events)
        self.lighthouse.node = f"{name}:{number}"
        self.lighthouse.ports = Ports(self, sim.ports)  # type: ignore[assignment]
        self.loop.create_task(self._run())

    async def _run(self) -> None:
        """Do as the lifespan of ``app.Lighthouse`` does."""
        try:
            async with self.lighthouse.registry.following(self.store):
                if self.store.exclusive:
                    await self.lighthouse.begin_term()
                self.lighthouse.serving = True
                if self.store.exclusive:
                    await self.lighthouse.keep_term()
                else:
                    await self.lighthouse.stand_by(self.address, LeaderLink(IdentityOf(self)))  # type: ignore[arg-type]
        except (StoreError, TimeoutError) as error:
            if not self.store.exclusive or self.loop.dead:
                raise
            self.sim.note(f"{self.name} exits: {error}")
            self.sim.time.after(0.0, self.sim.kill_lighthouse, self, RESTART_SECONDS)

    # ---- leadership

    @property
    def leads(self) -> bool:
        """Whether it leads in its own opinion."""
        return not self.loop.dead and self.lighthouse.term is not None

    @property
    def leads_in_store(self) -> bool:
        """Whether it leads by what the store says."""
        leadership = self.lighthouse.leadership
        if leadership is None:
            return self.store.exclusive
        return leadership.core.mine is not None and self.sim.store.values.get(LEADER_KEY) == leadership.core.mine

    def lease_ended(self, now: float) -> bool:
        leadership = self.lighthouse.leadership
        return leadership is not None and now > self.sim.store.lead_until.get(leadership._lease, 0.0)

    def why_no_quorum(self) -> str:
        if self.leads and (job := self.lighthouse.jobs.get("job")) is not None:
            return f"{self.name}: {job.core.reason(self.loop.time()).sentence}"
        return f"{self.name}: {self.lighthouse.trouble}"

    def spared_hangs(self) -> tuple[str, list[str]]:
        """Return what it says about groups that hang and are not ended, and which groups are its spares."""
        job = self.lighthouse.jobs.get("job") if self.leads else None
        if job is None:
            return "", []
        said = "; ".join(one for one in job.core.hang_sentences() if "not ended" in one)
        return said, job.core._groups.spares()

    # ---- life

    def kill(self) -> None:
        """End as SIGKILL does. The kernel closes some connections and loses others."""
        if self.loop.dead:
            return
        sockets = list(self.sockets)
        self.loop.kill()
        for socket in sockets:
            if self.sim.random.random() < 0.5:
                socket.connection.cut()
            else:
                socket.connection.close(socket)

    # ---- connections

    async def dial(self, url: str) -> Socket:
        """Connect to another lighthouse."""
        await asyncio.sleep(UPGRADE_SECONDS + 0.005 * self.sim.random.random())
        other = self.sim.nodes[url.removesuffix(PATH)]
        if self.sim.mesh.is_partitioned(self.address, other.address):
            await asyncio.sleep(self.sim.random.choice((0.001, 30.0)))
            raise OSError("no route")
        while other.loop.asleep:  # noqa: ASYNC110 - events do not reach over processes
            await asyncio.sleep(0.05)
        if other.loop.dead:
            raise OSError("connection refused")
        if not other.leads:
            raise UpgradeError(503, "it does not lead")
        here, there = Socket(self), Socket(other)
        here.connection = there.connection = self.sim.mesh.connect(self.address, here, other.address, there)
        other.loop.create_task(other._serve_follower(there))
        return here

    def accept(self, socket: Socket) -> None:
        """Serve a group that connected."""
        self.loop.call_soon(self._start_serving, socket)

    def _start_serving(self, socket: Socket) -> None:
        self.loop.create_task(self._serve_group(socket))

    async def _serve_follower(self, socket: Socket) -> None:
        await self.lighthouse.followers.serve(socket)  # type: ignore[arg-type]

    async def _serve_group(self, socket: Socket) -> None:
        """Do as the session handler of ``app.Lighthouse`` does."""
        if await self.lighthouse.leader_elsewhere() is None and self.lighthouse.term is None:
            socket.end()
            return
        session = self.lighthouse.new_session("job")
        await session.accept(socket)  # type: ignore[arg-type]
        self.lighthouse.add_session(session)
        await session.ended()

    def serves(self, connection: Connection | None) -> bool:
        return connection is not None and any(one.connection is connection for one in self.sockets)

    # ---- orders

    def order(self, order: Any) -> None:
        self.loop.create_task(self._order(order))

    async def _order(self, order: Any) -> None:
        if (job := self.lighthouse.jobs.get("job")) is not None:
            if isinstance(order, ReplaceOrdered) and job.core.irreplaceable(order.target):
                return  # refused, as by the API
            try:
                await job.order(order)
            except TermOverError as error:
                self.sim.note(f"the outcome of {order} is unknown to {self.name}: {error}")


def address_of(name: str) -> str:
    return f"http://{name}"


class _Events(EventLog):
    """An event log that is kept in the simulation's logs, as a ``FiledEventLog`` is in its file."""

    def __init__(self, node: Node, file: str) -> None:
        super().__init__()
        self._node, self._file = node, file
        self._last_id = node.sim.logs.last_event(file)

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.add("", "term", "", {"owner": self._node.lighthouse.node}, 0.0)

    def add(self, job: str, kind: str, replica_id: str, detail: dict[str, Data], now_unix: float) -> Happened:
        happened = super().add(job, kind, replica_id, detail, now_unix)
        if not self._node.loop.dead:
            self._node.sim.logs.event(self._file, happened)
        return happened


class _CheckedJob(Job):
    """A job whose events, decisions and messages are checked."""

    def __init__(self, sim: Simulation, *args: Any) -> None:
        self._checks, self._network, self._workers = sim.quorums, sim.ports, sim.workers
        self._spares = sim.spares
        super().__init__(*args)

    def handle(self, event: Event) -> None:
        self._checks.before_event(self, event)
        super().handle(event)
        self._checks.after_event(self)

    def _carry_out(self, decisions: list[Any]) -> None:
        self._checks.on_decisions(self, decisions)
        if self._spares is not None:
            self._spares.on_decisions(self, decisions)
        if self._network is not None:
            for entry in decisions:
                if isinstance(entry, LogEntry) and entry.replica_id in self._workers:  # not a stable name
                    self._network.check(self, entry, self._workers[entry.replica_id])
        super()._carry_out(decisions)

    def _announce(self, announce: Announce) -> None:
        self._checks.on_announce(self, announce)
        super()._announce(announce)

    def _do(self, decision: Any) -> None:
        if isinstance(decision, Tell):
            self._checks.on_tell(self, decision)
        super()._do(decision)


class _Log:
    """Put what the lighthouse logs into the trace. An exception that it logs is a fault of the process."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def exception(self, event: str, **fields: object) -> None:
        self._sim.on_logged_exception(f"{event} {fields}: {sys.exc_info()[1]!r}")

    def _note(self, event: str, **fields: object) -> None:
        if self._sim.tracing:
            self._sim.note(f"   {self._sim.running_node()}  {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))

    def bind(self, **_: object) -> _Log:
        return self

    debug = info = warning = error = _note


TIMED = (event_log, job, lighthouse_node, campaign, nodes, service_registry, term)
LOGGING = (
    event_log,
    job,
    lighthouse_node,
    leader_link,
    campaign,
    nodes,
    service_registry,
    sessions,
    term,
)


@contextmanager
def simulated(sim: Simulation) -> Iterator[None]:
    """Let lighthouses run on the time, the wires and the checks of ``sim`` while this lasts."""
    log, clock = _Log(sim), ProcessClock(sim.time)
    with replaced(
        [
            *((module, "time", clock) for module in TIMED),
            *((module, "log", log) for module in LOGGING),
            (websocket, "Link", Wire),
            (leader_link, "Link", Wire),
            (job, "LOUD", dict.fromkeys(job.LOUD, log.warning)),
            (lighthouse_node, "Job", partial(_CheckedJob, sim)),
        ]
    ):
        yield
