"""A lighthouse process in virtual time: the real ``LighthouseNode`` and all that it is made of, on simulated wires."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from keepstep_lighthouse.jobs import bad_messages, event_log, job, lighthouse_node, sessions
from keepstep_lighthouse.jobs.event_log import EventLog, Happened
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.leadership import campaign, leader_link, nodes, term
from keepstep_lighthouse.leadership.leader_link import PATH, LeaderLink
from keepstep_lighthouse.leadership.term import TermOverError
from keepstep_lighthouse.quorum.events import Announce, Tell
from keepstep_lighthouse.registry import service_registry
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_mesh.net.websocket import UpgradeError
from keepstep_mesh.protocol.membership import Data
from tests.simulation.process import ProcessLoop, clocks_of_processes
from tests.simulation.shared_store import StoreClient
from tests.simulation.wires import IdentityOf, Socket, Wire

if TYPE_CHECKING:
    from tests.simulation.mesh import Mesh

UPGRADE_SECONDS = 0.002


class Node:
    """``rate``: of its clock. One process; started anew it is another ``Node`` at the same address."""

    def __init__(self, sim: Mesh, name: str, number: int, rate: float, lease: float) -> None:
        self.sim = sim
        self.name = name
        self.address = address_of(name)
        self.loop = ProcessLoop(sim.time, rate, sim.fault)
        self.sockets: list[Socket] = []
        self.store = StoreClient(sim.store, self.loop, sim.time, sim.random)
        self.lighthouse = LighthouseNode(LighthouseSettings(store="shared://", policy=sim.policy, lease=lease))
        self.lighthouse.node = f"{name}:{number}"
        self.lighthouse.store = self.store
        self.lighthouse.events = _Events(self)
        self.loop.create_task(self._live())

    async def _live(self) -> None:
        async with self.lighthouse.registry.following(self.store):
            self.lighthouse.serving = True
            await self.lighthouse.stand_by(self.address, LeaderLink(IdentityOf(self)))  # type: ignore[arg-type]

    # ---- life

    @property
    def leads(self) -> bool:
        """In its own opinion."""
        return not self.loop.dead and self.lighthouse.term is not None

    def kill(self) -> None:
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
        """A link to another lighthouse."""
        await asyncio.sleep(UPGRADE_SECONDS + 0.005 * self.sim.random.random())
        other = self.sim.nodes[url.removesuffix(PATH)]
        if frozenset((self.address, other.address)) in self.sim.parted_lighthouses:
            await asyncio.sleep(self.sim.random.choice((0.001, 30.0)))
            raise OSError("no route")
        while other.loop.asleep:  # noqa: ASYNC110 - events do not reach over processes
            await asyncio.sleep(0.05)
        if other.loop.dead:
            raise OSError("connection refused")
        if not other.leads:
            raise UpgradeError(503, "it does not lead")
        here, there = Socket(self), Socket(other)
        here.connection = there.connection = self.sim.connect(here, there)
        other.loop.create_task(other.follow(there))
        return here

    async def follow(self, socket: Socket) -> None:
        """Another lighthouse has come to follow this one."""
        await self.lighthouse.followers.serve(socket)  # type: ignore[arg-type]

    async def serve(self, socket: Socket) -> None:
        """A worker has come. ``app.Lighthouse`` does the same with a request."""
        await self.lighthouse.election_over()
        if self.lighthouse.leader_elsewhere() is None and self.lighthouse.term is None:
            socket.end()
            return
        session = self.lighthouse.new_session("job")
        await session.accept(socket)  # type: ignore[arg-type]
        self.lighthouse.add_session(session)
        await session.ended()

    # ---- orders

    def order(self, order: Any) -> None:
        self.loop.create_task(self._order(order))

    async def _order(self, order: Any) -> None:
        if (job := self.lighthouse.jobs.get("job")) is not None:
            try:
                await job.order(order)
            except TermOverError as error:
                self.sim.note(f"{self.name} does not know what became of {order}: {error}")


def address_of(name: str) -> str:
    return f"http://{name}"


class _Events(EventLog):
    """Kept in the simulation's logs, as a ``FiledEventLog`` keeps them in its file."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self._last_id = node.sim.logs.last_event(node.name)

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.add("", "term", "", {"owner": self._node.lighthouse.node}, 0.0)

    def add(self, job: str, kind: str, replica_id: str, detail: dict[str, Data], now_unix: float) -> Happened:
        happened = super().add(job, kind, replica_id, detail, now_unix)
        if not self._node.loop.dead:
            self._node.sim.logs.event(self._node.name, happened)
        return happened


class _WatchedJob(Job):
    """Shows the simulation what is announced and told."""

    def handle(self, event: Any) -> None:
        super().handle(event)
        _sim().checked(self)

    def _announce(self, announce: Announce) -> None:
        _sim().announced(self, announce)
        super()._announce(announce)

    def _do(self, decision: Any) -> None:
        if isinstance(decision, Tell):
            _sim().told(self, decision)
        super()._do(decision)


class _Log:
    """What the product logs goes to the trace; what it logs as a fault of its own is one."""

    def __init__(self, sim: Mesh) -> None:
        self._sim = sim

    def exception(self, event: str, **fields: object) -> None:
        self._sim.fault_in_running_process(f"{event} {fields}: {sys.exc_info()[1]!r}")

    def _note(self, event: str, **fields: object) -> None:
        if self._sim.tracing:
            self._sim.note(f"   {self._sim.running_node()}  {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))

    def bind(self, **_: object) -> _Log:
        return self

    debug = info = warning = error = _note


_current: list[Mesh] = []


def _sim() -> Mesh:
    return _current[-1]


TIMED = [event_log, job, lighthouse_node, campaign, service_registry, term]
LOGGING = [
    event_log,
    job,
    lighthouse_node,
    leader_link,
    campaign,
    bad_messages,
    nodes,
    service_registry,
    sessions,
    term,
]


@contextmanager
def simulated(sim: Mesh) -> Iterator[None]:
    """Processes run on the simulation's time and wires while this lasts."""
    log = _Log(sim)
    with ExitStack() as stack:
        stack.enter_context(clocks_of_processes(sim.time, TIMED))
        stack.enter_context(patch.object(sessions.websocket, "Link", Wire))
        stack.enter_context(patch.object(leader_link, "Link", Wire))
        stack.enter_context(patch.object(lighthouse_node, "Job", _WatchedJob))
        for module in LOGGING:
            stack.enter_context(patch.object(module, "log", log))
        _current.append(sim)
        stack.callback(_current.pop)
        yield
