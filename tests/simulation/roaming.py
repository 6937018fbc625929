"""A replica group that has several lighthouses: it goes where it is sent, and leaves who is behind or silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepstep_mesh import codec
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.messages import Heartbeat, Moved, NotLeader, QuorumAnswer, Refused, Welcome
from keepstep_mesh.session_core import Addresses, StaleLighthouseError
from simulation.network import FIN, Connection
from simulation.wires import PING, PONG, CloseFrame
from simulation.worker import Worker

if TYPE_CHECKING:
    from simulation.failover import Failover

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""As ``LighthouseSession`` has it: it asks after half of that, and goes after the other half."""
STALLED_SECONDS = 1.25


class Roaming(Worker):
    def __init__(self, simulation: Failover, name: str, number: int) -> None:
        self.mesh = simulation
        self.address = ""
        self.highest = (0, 0)
        """(epoch, quorum_id) that it has accepted."""
        self._dialing = False
        self._came_at = self._heard_at = 0.0
        self._pinged: float | None = None
        addresses = list(simulation.nodes)
        simulation.random.shuffle(addresses)
        self.addresses = Addresses(addresses)
        super().__init__(simulation, name, number)

    # ---- where to go

    def connect(self) -> None:
        if self.connection is None and not self._dialing and not self.banned:
            self._dialing = True
            delay, self.address = self.addresses.next(self.random.random())
            self.soon(delay + 0.001, self._dial)

    def _dial(self) -> None:
        self._dialing = False
        if self.connection is not None:
            return
        self.connection = self.sim.dial(self)
        if self.connection is None:
            self.soon(0.001, self.connect)
        else:
            self.connection.send(self, self.session.hello())
            self.soon(5.0, self._give_up_on, self.connection)

    def hang_up(self) -> None:
        self._leave_behind(silent=False)
        super().hang_up()

    def _leave_behind(self, *, silent: bool) -> None:
        if self.welcomed:
            self.addresses.lost(self.address, self.sim.time.now - self._came_at, silent=silent)

    def _move(self) -> None:
        self._say(Moved())
        self.hang_up()

    # ---- signs of life

    def _beat(self, connection: Connection, due: float) -> None:
        if connection is not self.connection:
            return
        now = self.sim.time.now
        self._say(Heartbeat())
        stalled, quiet = now - due > STALLED_SECONDS, now - self._heard_at
        if quiet < SILENCE_SECONDS / 2:
            self._pinged = None
        elif self._pinged is None or stalled:
            self._pinged = now
            connection.send(self, PING)
        elif now - self._pinged >= SILENCE_SECONDS / 2:
            self._leave_behind(silent=True)
            self.welcomed = False
            super().hang_up()
            return
        self.soon(HEARTBEAT_SECONDS, self._beat, connection, now + HEARTBEAT_SECONDS)

    # ---- what it is told

    def _receive(self, connection: Connection, message: Any) -> None:
        if connection is not self.connection:
            return
        self._heard_at = self.sim.time.now
        if isinstance(message, bytes):
            message = codec.decode(message, codec.MAX_SERVER_FRAME_BYTES)
        if message is PING:
            connection.send(self, PONG)
        elif isinstance(message, CloseFrame) or message is PONG:
            return
        elif isinstance(message, NotLeader):
            self.addresses.follow(message.leader)
            self._move()
        elif isinstance(message, Refused) and message.code == "not_ready":
            self._move()
        else:
            self._take(connection, message)

    def _take(self, connection: Connection, message: Any) -> None:
        if message is FIN:
            self._leave_behind(silent=False)
        if isinstance(message, Welcome):
            self._came_at, self._pinged = self.sim.time.now, None
            self.soon(HEARTBEAT_SECONDS, self._beat, connection, self.sim.time.now + HEARTBEAT_SECONDS)
        try:
            super()._receive(connection, message)
        except StaleLighthouseError:
            self._move()
            return
        if isinstance(message, Welcome | QuorumAnswer):
            quorum_id = message.quorum_id if isinstance(message, QuorumAnswer) else self.highest[1]
            if message.epoch < self.highest[0] or quorum_id < self.highest[1]:
                self.sim.violated(f"{self.replica_id} has seen {self.highest} and takes {message}")
            self.highest = message.epoch, quorum_id

    def _check(self, act: Any, message: Any) -> Any:
        try:
            return act(message)
        except StaleLighthouseError:
            raise
        except ProtocolError as error:
            self.sim.violated(f"{self.replica_id} refuses {type(message).__name__}: {error}")
