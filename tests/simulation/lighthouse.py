"""A lighthouse in virtual time: the real core, a shell that writes before it speaks, a store that outlives it."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from keepstep_lighthouse.quorum.events import (
    Announce,
    Asked,
    Cancelled,
    Closed,
    Decision,
    EndSession,
    Event,
    GroupFailed,
    HealProgress,
    JobRecord,
    LeftOnPurpose,
    LogEntry,
    Opened,
    Persist,
    Tell,
    Tick,
)
from keepstep_lighthouse.quorum.machine import JobCore
from keepstep_mesh.protocol.messages import (
    CancelRequest,
    Evicted,
    Failed,
    Healing,
    Heartbeat,
    Hello,
    Leave,
    QuorumAnswer,
    QuorumRequest,
    Welcome,
)
from tests.simulation.network import FIN, Connection

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation


MAX_TICKS_AT_ONCE = 10


class Store:
    """What outlives the lighthouse."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.epoch = 0


class Lighthouse:
    """One process. ``kill`` ends it at once; what it had not written is lost."""

    def __init__(self, simulation: Simulation, store: Store, random: Random) -> None:
        self.sim, self.store, self.random = simulation, store, random
        store.epoch += 1
        self.epoch = store.epoch
        self.alive = True
        self.asleep = False
        self.core = JobCore("job", store.record, self.now, self.now, restarted=bool(store.record.members))
        self.connections: dict[int, Connection] = {}
        self.replica_of: dict[int, str] = {}
        self._outbox: list[Decision | Connection] = []
        self._writing = False
        self._inbox: list[tuple[Connection, Any]] = []
        self._cancelled: set[tuple[int, int]] = set()
        self._listed: dict[int, int] = {}
        self._tick_at: float | None = None
        self._ticked, self._ticks = -1.0, 0
        self._set_timer()

    @property
    def now(self) -> float:
        return self.sim.time.now

    def kill(self) -> None:
        self.alive = False
        for connection in list(self.connections.values()):
            if self.random.random() < 0.5:
                connection.cut()
            else:
                connection.close(self)
        self.sim.note("the lighthouse is dead")

    def sleep(self, seconds: float) -> None:
        """It is not scheduled for a while; frames wait in its sockets."""
        self.asleep = True
        self.sim.time.after(seconds, self._wake)

    def _wake(self) -> None:
        if not self.alive or not self.asleep:
            return
        self.asleep = False
        self._tick_at = None
        self.handle(Tick())
        inbox, self._inbox = self._inbox, []
        for connection, message in inbox:
            self.receive(connection, message)

    # ---- in

    def receive(self, connection: Connection, message: Any) -> None:
        if not self.alive:
            return
        if self.asleep:
            self._inbox.append((connection, message))
            return
        number = connection.number
        if message is FIN:
            if self.connections.pop(number, None) is not None:
                self.handle(Closed(number))
            return
        if type(message) is Hello:
            self.connections[number] = connection
            self.replica_of[number] = message.replica_id
            self.handle(Opened(number, message.replica_id, message.quorum_id_seen, message.held), connection)
            return
        if number not in self.connections:
            return
        match message:
            case Heartbeat():
                self.core.heard(number, self.now)
            case QuorumRequest():
                self.handle(Asked(number, message))
            case CancelRequest(request):
                self._cancelled.add((number, request))
                self.handle(Cancelled(number, request))
            case Healing():
                self.handle(HealProgress(number, message))
            case Leave(reason):
                self.handle(LeftOnPurpose(number, reason))
            case Failed(reason):
                self.handle(GroupFailed(number, reason))

    def handle(self, event: Event, welcome: Connection | None = None) -> None:
        if not self.alive:
            return
        decisions: list[Decision | Connection] = [*self.core.handle(event, self.now, self.now)]
        self.sim.after_event(self.core)
        self.sim.trace_event(event, decisions)
        for decision in decisions:
            if isinstance(decision, Announce):
                if gone := [number for number, _ in decision.to if number not in self.connections]:
                    self.sim.violated(f"sessions {gone} are over and in quorum {decision.quorum_id}")
                if self._cancelled.intersection(decision.to):
                    self.sim.violated(f"a cancelled request is in quorum {decision.quorum_id}")
        if welcome is not None and EndSession(welcome.number) not in decisions:
            place = next((i for i, one in enumerate(decisions) if isinstance(one, Tell | Announce)), len(decisions))
            decisions.insert(place, welcome)
        self._outbox += decisions
        self._carry_out()
        self._set_timer()

    # ---- write, then speak

    def _carry_out(self) -> None:
        while self._outbox and not self._writing and self.alive:
            decision = self._outbox.pop(0)
            if isinstance(decision, Persist):
                self._writing = True
                delay = 0.02 * self.random.random()
                self.sim.time.after(delay * self.random.random(), self._land, decision.record)
                self.sim.time.after(delay, self._written)
            else:
                self._do(decision)

    def _land(self, record: JobRecord) -> None:
        was_sent = self.alive or self.random.random() < 0.5
        if was_sent and self.sim.lighthouse is self:
            self.store.record = record

    def _written(self) -> None:
        self._writing = False
        self._carry_out()

    def _do(self, decision: Decision | Connection) -> None:
        match decision:
            case Connection():
                if decision.number in self.connections:
                    decision.send(self, Welcome(1, self.epoch, self.store.record.quorum_id, 1000, 5000, 200))
            case Announce():
                self.sim.announced(self, decision)
                for number, request in decision.to:
                    if (connection := self.connections.get(number)) is not None:
                        knows = decision.uniform and self._listed.get(number) == decision.version
                        self._listed[number] = decision.version
                        connection.send(
                            self,
                            QuorumAnswer(
                                request,
                                self.epoch,
                                decision.quorum_id,
                                decision.created_ms,
                                decision.version,
                                decision.step,
                                decision.lineage,
                                decision.joiners,
                                None if knows else decision.members,
                                allow_heal=decision.allow_heal,
                            ),
                        )
            case Tell(to, message):
                for number in to:
                    if isinstance(message, Evicted) and self.replica_of[number] not in self.store.record.evicted:
                        self.sim.violated(f"{self.replica_of[number]} hears of an eviction that is not written")
                    if (connection := self.connections.get(number)) is not None:
                        connection.send(self, message)
            case LogEntry():
                self.sim.logs.entry(self, decision)
            case EndSession(number):
                if (connection := self.connections.pop(number, None)) is not None:
                    connection.close(self)

    # ---- time

    def _set_timer(self) -> None:
        due = self.core.deadline()
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            self.sim.time.at(due, self._tick, due)

    def _tick(self, due: float | None) -> None:
        if not self.alive or self.asleep or due != self._tick_at:
            return
        self._tick_at = None
        self._ticks = self._ticks + 1 if self._ticked == self.now else 0
        self._ticked = self.now
        if self._ticks > MAX_TICKS_AT_ONCE:
            self.sim.violated("the core wants tick after tick and time stands still")
        for connection in self.connections.values():  # heartbeats, without an event for each
            if not connection.parted and self.sim.beats(self.replica_of[connection.number]):
                self.core.heard(connection.number, self.now)
        self.handle(Tick())
