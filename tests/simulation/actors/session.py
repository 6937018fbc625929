"""The session of a replica group: the real state machine, address list and liveness check on simulated connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepstep.session.liveness import Liveness
from keepstep.session.session_machine import SessionCore, StaleLighthouseError
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.net.lighthouse_addresses import Addresses
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import Heartbeat, Moved, NotLeader, Quorum, Refused, Welcome
from tests.simulation.virtual.network import FIN, Connection
from tests.simulation.virtual.wires import PING, PONG, CloseFrame

if TYPE_CHECKING:
    from tests.simulation.actors.incarnation import Incarnation

HEARTBEAT = codec.encode(Heartbeat())
WELCOME_SECONDS = 5.0


class Session:
    """Find the leader among ``addresses``, stay connected to it, and pass its messages to ``worker``."""

    def __init__(self, worker: Incarnation, addresses: list[str]) -> None:
        self.core = SessionCore(worker.replica_id, about=worker.about)
        self.addresses = Addresses(addresses)
        self.address = ""
        """The address connected to, or tried last."""
        self.connection: Connection | None = None
        self.welcomed = False
        self._worker, self._sim = worker, worker.sim
        self._time = worker.sim.time
        self._liveness = Liveness(0.5, 5.0)
        self._dialing = False
        self._welcomed_at = self._heard_at = 0.0
        self._highest = (0, 0)
        """The highest (epoch, quorum_id) that the group accepted."""

    # ---- connections

    def connect(self) -> None:
        if self.connection is None and not self._dialing:
            self._dialing = True
            delay, self.address = self.addresses.next(self._worker.random.random())
            self._worker.soon(delay + 0.001, self._dial)

    def _dial(self) -> None:
        self._dialing = False
        if self.connection is not None:
            return
        connection = self.connection = self._sim.dial(self._worker.name, self, self.address)
        if connection is None:
            self._worker.soon(0.001, self.connect)
        else:
            connection.send(self, self.core.hello())
            self._worker.soon(WELCOME_SECONDS, self._on_welcome_timeout, connection)

    def _on_welcome_timeout(self, connection: Connection) -> None:
        if self.connection is connection and not self.welcomed:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection and look for another one."""
        self._note_lost()
        if self.connection is not None:
            self.connection.close(self)
            self.connection, self.welcomed = None, False
            self.connect()

    def _note_lost(self) -> None:
        if self.welcomed:
            self.addresses.lost(self.address, self._time.now - self._welcomed_at, silent=self._liveness.silent)

    def _move(self) -> None:
        self.send(Moved())
        self.hang_up()

    def close(self) -> None:
        """End the connection as the kernel does when the process dies."""
        if self.connection is not None:
            self.connection.close(self)

    def send(self, message: Any) -> None:
        """Send ``message`` if the group is welcomed; drop it otherwise."""
        if self.connection is not None and self.welcomed:
            self._liveness.sent(self._time.now)
            self.connection.send(self, message)

    # ---- liveness

    def _heartbeat(self, connection: Connection, due: float) -> None:
        if connection is not self.connection:
            return
        now, live = self._time.now, self._liveness
        if now >= live.beat_due:
            self.send(HEARTBEAT)
        verdict = live.judge(now, self._heard_at, stalled=live.is_late(now, due))
        if verdict == "ask":
            connection.send(self, PING)
        elif verdict == "silent":
            self.hang_up()
            return
        self._worker.soon(live.beat_due - now, self._heartbeat, connection, live.beat_due)

    # ---- messages

    def receive(self, connection: Connection, message: Any) -> None:
        self._worker.act(self._on_message, (connection, message))

    def _on_message(self, connection: Connection, message: Any) -> None:
        if connection is not self.connection:
            return
        self._heard_at = self._time.now
        if type(message) is bytes:
            message = codec.decode(message, codec.MAX_SERVER_FRAME_BYTES)
        if message is FIN:
            self._note_lost()
            self.connection, self.welcomed = None, False
            self.connect()
        elif message is PING:
            connection.send(self, PONG)
        elif message is PONG or isinstance(message, CloseFrame):
            return
        elif isinstance(message, NotLeader):
            self.addresses.follow(message.leader)
            self._move()
        elif isinstance(message, Refused) and message.code == "not_ready":
            self._move()
        else:
            self._on_decision(connection, message)

    def _on_decision(self, connection: Connection, message: Any) -> None:
        try:
            if isinstance(message, Quorum):
                self._on_answer(message)
            elif isinstance(message, Welcome):
                self._on_welcome(connection, message)
            else:
                self._worker.on_message(message)
        except StaleLighthouseError as error:
            if len(self._sim.nodes) == 1:
                self._sim.violated(f"{self._worker.replica_id} refuses the only lighthouse: {error}")
            self._move()
        except ProtocolError as error:
            self._sim.violated(f"{self._worker.replica_id} refuses {type(message).__name__}: {error}")

    def _on_welcome(self, connection: Connection, welcome: Welcome) -> None:
        self.core.welcomed(welcome)
        self._accept(welcome.epoch, self._highest[1])
        self.welcomed = True
        now, live = self._time.now, self._liveness
        self._welcomed_at = now
        live.interval, live.timeout = welcome.heartbeat_interval_ms / 1000, welcome.heartbeat_timeout_ms / 1000
        live.begins(now)
        self._worker.soon(live.interval, self._heartbeat, connection, now + live.interval)
        self._worker.on_welcome()

    def _on_answer(self, answer: Quorum) -> None:
        asked = self.core.open
        quorum = self.core.answered(answer)
        self._accept(answer.epoch, answer.quorum_id)
        if quorum is not None and asked is not None:
            self._worker.on_quorum(quorum, asked)

    def _accept(self, epoch: int, quorum_id: int) -> None:
        if epoch < self._highest[0] or quorum_id < self._highest[1]:
            who = self._worker.replica_id
            self._sim.violated(f"{who} accepted {self._highest} and now epoch {epoch}, quorum {quorum_id}")
        self._highest = epoch, quorum_id
