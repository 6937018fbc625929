"""A replica group that has several lighthouses: it goes where it is sent, and leaves who is behind or silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import Heartbeat, Moved, NotLeader, QuorumAnswer, Refused, Welcome
from keepstep_mesh.session.liveness import Liveness
from keepstep_mesh.session.session_machine import Addresses, StaleLighthouseError
from tests.simulation.network import FIN, Connection
from tests.simulation.wires import PING, PONG, CloseFrame
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.mesh import Mesh


class Roaming(Worker):
    def __init__(self, simulation: Mesh, name: str, number: int) -> None:
        self.mesh = simulation
        self.address = ""
        self.highest = (0, 0)
        """(epoch, quorum_id) that it has accepted."""
        self._dialing = False
        self._came_at = self._heard_at = 0.0
        self.liveness = Liveness(0.5, 5.0)
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
        self._leave_behind()
        super().hang_up()

    def _leave_behind(self) -> None:
        if self.welcomed:
            self.addresses.lost(self.address, self.sim.time.now - self._came_at, silent=self.liveness.silent)

    def _move(self) -> None:
        self._say(Moved())
        self.hang_up()

    # ---- signs of life

    def _beat(self, connection: Connection, due: float) -> None:
        if connection is not self.connection:
            return
        now, live = self.sim.time.now, self.liveness
        self._say(Heartbeat())
        live.sent(now)
        verdict = live.judge(now, self._heard_at, stalled=live.is_late(now, due))
        if verdict == "ask":
            connection.send(self, PING)
        elif verdict == "silent":
            self.hang_up()
            return
        self.soon(live.interval, self._beat, connection, now + live.interval)

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
            self._leave_behind()
        if isinstance(message, Welcome):
            now, live = self.sim.time.now, self.liveness
            self._came_at = now
            live.interval, live.timeout = message.heartbeat_interval_ms / 1000, message.heartbeat_timeout_ms / 1000
            live.begins(now)
            self.soon(live.interval, self._beat, connection, now + live.interval)
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
