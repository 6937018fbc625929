"""Messages over one WebSocket, at either end of it: codec, heartbeats, and the watch on a silent peer."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.session.alarm import Alarm
from keepstep.session.liveness import Liveness
from keepstep_mesh.net.websocket import Link
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import Heartbeat

UNSENT_BYTES = 4 * codec.MAX_FRAME_BYTES
"""Limit of what waits for a peer that does not read."""
CLOSE_SECONDS = 1.0
"""Limit for a peer to read the last messages and to close the connection."""


class MessageChannel:
    """Open it with ``connect`` or ``accept`` of its ``link``. All callbacks run in the read callback of the loop.

    Args:
        liveness: times of heartbeats; judges whether the peer is silent.
        on_message: called with each message.
        on_bad: called with a ``ProtocolError`` if the peer violates the protocol, and with any exception that
            ``on_message`` raises. It closes the channel.
        on_silent: called once when the peer is silent for too long, with the seconds. It closes the channel.
        on_lost: called once, when the connection has ended, with the reason.
        limit_bytes: of a message from the peer.
        unsent_bytes: limit of what waits for a peer that does not read.
    """

    def __init__(
        self,
        liveness: Liveness,
        *,
        on_message: Callable[[codec.Message], None],
        on_bad: Callable[[Exception], None],
        on_silent: Callable[[float], None],
        on_lost: Callable[[str], None],
        limit_bytes: int,
        unsent_bytes: int = UNSENT_BYTES,
    ) -> None:
        self.liveness = liveness
        self.link = Link(self._on_frame, self._on_link_lost, limit_bytes=limit_bytes, unsent_bytes=unsent_bytes)
        self._on_message = on_message
        self._on_bad = on_bad
        self._on_silent = on_silent
        self._on_lost = on_lost
        self._limit_bytes = limit_bytes
        self._alarm = Alarm(self.tick)

    def watch(self) -> None:
        """Send heartbeats, and watch for the silence of the peer, from now on."""
        self.liveness.begins(self.link.loop.time())
        self.tick()

    def send(self, message: codec.Message) -> None:
        """Send ``message``. Does nothing once the connection is closing."""
        self.liveness.sent(self.link.loop.time())
        self.link.send(codec.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a message that is encoded already."""
        self.liveness.sent(self.link.loop.time())
        self.link.send(frame)

    def tick(self) -> None:
        """Send the heartbeat if it is due, judge the peer, and set the next tick. Call it when ``liveness`` changes."""
        now = self.link.loop.time()
        stalled = self._alarm.due is not None and self.liveness.is_late(now, self._alarm.due)
        if now >= self.liveness.beat_due:
            self.send(Heartbeat())
        self._alarm.set(self.liveness.beat_due)
        match self.liveness.judge(now, self.link.last_received, stalled=stalled):
            case "ask":
                self.link.ping()
            case "silent":
                self._alarm.set(None)
                self._on_silent(now - self.link.last_received)

    def _on_frame(self, frame: bytes) -> None:
        try:
            self._on_message(codec.decode(frame, self._limit_bytes))
        except Exception as error:  # noqa: BLE001  the callee decides; on the loop it would end the connection unsaid
            self._on_bad(error)

    def _on_link_lost(self, reason: str) -> None:
        self._alarm.set(None)
        self._on_lost(reason)
