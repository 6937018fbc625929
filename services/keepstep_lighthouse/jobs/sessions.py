"""One worker's connection: a hello within its deadline, then frames that become events.

A violation of the protocol ends the session with ``Refused("bad_message")`` and the reason; it reaches neither the core
nor another session. A peer that does not read is cut off by its link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from aiohttp import web

from keepstep_lighthouse.quorum.events import (
    Asked,
    Cancelled,
    Closed,
    Event,
    GroupFailed,
    HealProgress,
    LeftOnPurpose,
    MovedAway,
    ShardsReported,
    StacksReported,
)
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ProtocolError, VersionError
from keepstep_mesh.net import websocket
from keepstep_mesh.protocol import codec, names
from keepstep_mesh.protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    CancelRequest,
    Failed,
    Healing,
    Heartbeat,
    Hello,
    Leave,
    Moved,
    NotLeader,
    QuorumRequest,
    Refused,
    ServiceAddress,
    ShardReport,
    Timing,
    Welcome,
)
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.protocol.stack_messages import RankStacks

HELLO_SECONDS = 10.0
SESSION_CLOSE_SECONDS = 5.0
"""Time for the peer to read the last messages before the connection is aborted."""
UNSENT_BYTES = 64 * 1024 * 1024
"""Limit of the send buffer: several full member lists of a large job."""
MAX_EARLY_FRAMES = 16
"""Limit of frames between a hello and its welcome."""

log = get_logger("keepstep.lighthouse.session")


class JobShell(Protocol):
    """The part of a job that a session uses."""

    def handle(self, event: Event) -> None: ...

    def heard(self, session: int) -> None: ...


class Session:
    """The session of one worker.

    Args:
        number: unique within this process.
        job: its name.
        on_hello: called once, with a valid hello; the callee calls ``begin`` or ``refuse``.
        on_bad: called with the reason when the peer violates the protocol; the callee calls ``refuse``.
        on_end: called exactly once, when the connection has ended.
        decode: decodes a frame, or raises ``ProtocolError``.
        services: gives the services to announce to the peer.
    """

    def __init__(
        self,
        number: int,
        job: str,
        *,
        on_hello: Callable[[Session, Hello], None],
        on_bad: Callable[[Session, str], None],
        on_end: Callable[[Session], None],
        decode: Callable[[bytes], codec.Message] = codec.decode,
        services: Callable[[], tuple[ServiceAddress, ...]] = tuple,
    ) -> None:
        self.number = number
        self.job = job
        self.replica_id = ""
        self.host = ""
        """Address from which the peer connected."""
        self.local = False
        """The peer is on this machine: it connected from the address that it connected to."""
        self.listed: tuple[int, int] | None = None
        """(epoch, version) of the member list that the peer has."""
        self.link = websocket.Link(
            self._on_frame, self._on_lost, limit_bytes=codec.MAX_FRAME_BYTES, unsent_bytes=UNSENT_BYTES
        )
        self.send = self.link.send
        self._on_hello = on_hello
        self._on_bad = on_bad
        self._on_end = on_end
        self._decode = decode
        self._services = services
        self._welcomed = False
        self._shell: JobShell | None = None
        """Set when the hello is accepted."""
        self._hello: Hello | None = None
        self._early: list[bytes] = []
        self._ending = False
        self._timer: asyncio.TimerHandle | None = None

    async def accept(self, request: web.Request) -> web.StreamResponse:
        """Answer the upgrade. If ``Link.accept`` raises, no session exists."""
        self.host = request.remote or ""
        own = request.transport.get_extra_info("sockname") if request.transport is not None else None
        self.local = own is not None and self.host == own[0]
        response = await self.link.accept(request)
        self._set_timer(HELLO_SECONDS, self._hello_is_late)
        return response

    async def ended(self) -> None:
        """Wait for the end of the connection. Cancelling this ends it."""
        try:
            await self.link.closed
        finally:
            self.link.abort("the handler was cancelled")

    @property
    def ending(self) -> bool:
        return self._ending

    # ---- in

    def _on_frame(self, frame: bytes) -> None:
        if self._ending:
            return
        try:
            if self._shell is not None:
                self._dispatch(self._shell, self._decode(frame))
            elif self._hello is None:
                self._greet(codec.decode(frame))
            else:
                self._hold_back(frame)
        except VersionError as error:
            too_old = self._hello is not None and self._hello.version < OLDEST_PROTOCOL_VERSION
            self.refuse("version_too_old" if too_old else "version_too_new", str(error))
        except ProtocolError as error:
            self._on_bad(self, str(error))

    def _dispatch(self, shell: JobShell, message: codec.Message) -> None:
        match message:
            case QuorumRequest():
                shell.handle(Asked(self.number, message))
            case Heartbeat():
                shell.heard(self.number)
            case CancelRequest(request):
                shell.handle(Cancelled(self.number, request))
            case Healing():
                shell.handle(HealProgress(self.number, message))
            case ShardReport():
                shell.handle(ShardsReported(self.number, message))
            case RankStacks():
                shell.handle(StacksReported(self.number, message))
            case Leave(reason, cause, step):
                shell.handle(LeftOnPurpose(self.number, reason, cause, step))
            case Moved():
                shell.handle(MovedAway(self.number))
            case Failed(reason):
                shell.handle(GroupFailed(self.number, reason))
            case _:
                raise ProtocolError(f"unexpected message {message.kind!r}")

    def _greet(self, message: codec.Message) -> None:
        if not isinstance(message, Hello):
            raise ProtocolError(f"a session begins with 'hello', not with {message.kind!r}")
        self._hello = message
        codec.check_version(message)
        if not 0 < len(message.replica_id) <= names.MAX_REPLICA_ID or not message.replica_id.isprintable():
            raise ProtocolError(f"hello.replica_id must be 1 to {names.MAX_REPLICA_ID} printable characters")
        self.replica_id = message.replica_id
        self._set_timer(None)
        self._on_hello(self, message)

    def _hold_back(self, frame: bytes) -> None:
        if len(self._early) >= MAX_EARLY_FRAMES:
            raise ProtocolError("too many frames before the welcome")
        self._early.append(frame)

    def begin(self, shell: JobShell) -> None:
        """Pass events to ``shell`` from now on, first those that arrived since the hello."""
        self._shell = shell
        early, self._early = self._early, []
        for frame in early:
            self._on_frame(frame)

    # ---- out

    def welcome(self, epoch: int, record: JobRecord, live_step: int) -> None:
        policy = record.policy
        interval_ms, timeout_ms, grace_ms = self._timing(policy)
        message = Welcome(
            version=PROTOCOL_VERSION,
            epoch=epoch,
            quorum_id=record.quorum_id,
            heartbeat_interval_ms=interval_ms,
            heartbeat_timeout_ms=timeout_ms,
            reconnect_grace_ms=grace_ms,
            services=self._services(),
            heal_timeout_ms=int(policy.heal_timeout * 1000),
            live_step=live_step,
            durable_relays=record.durable_relays,
        )
        self._welcomed = True
        self.send(codec.encode(message))

    def tell_timing(self, policy: Policy) -> None:
        """Send the timing of a changed policy. A peer that is not welcomed yet gets it with its welcome."""
        self._tell_welcomed(codec.encode(Timing(*self._timing(policy), int(policy.heal_timeout * 1000))))

    def tell_services(self, frame: bytes) -> None:
        """Send the registered services; ``frame`` is the same for all sessions."""
        self._tell_welcomed(frame)

    def _tell_welcomed(self, frame: bytes) -> None:
        if self._welcomed:
            self.send(frame)

    def _timing(self, policy: Policy) -> tuple[int, int, int]:
        """Heartbeat interval and timeout, reconnect grace; milliseconds."""
        asked = self._hello.heartbeat_interval_ms if self._hello is not None else 0
        timeout_ms = int(policy.heartbeat_timeout * 1000)
        # Ten signs of life within the timeout are enough: a thousand groups at ten a second each are a load.
        interval_ms = min(max(asked, timeout_ms // 10), max(1, timeout_ms // 3))
        return interval_ms, timeout_ms, int(policy.reconnect_grace * 1000)

    def refuse(self, code: str, reason: str) -> None:
        """Send the reason, then end the session."""
        self.send(codec.encode(Refused(code, reason)))
        self.end(reason)

    def redirect(self, leader: str) -> None:
        """Tell the peer that the lighthouse at this address leads."""
        self.send(codec.encode(NotLeader(leader)))
        self.end(f"{leader} leads")

    def end(self, reason: str, code: int = websocket.CLOSE_NORMAL) -> None:
        """Close the connection after the messages sent so far."""
        if not self._ending:
            self._ending = True
            self._set_timer(SESSION_CLOSE_SECONDS, partial(self.link.abort, "the peer does not read the last messages"))
            self.link.close(code, reason)

    def _set_timer(self, seconds: float | None, call: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None or call is None else self.link.loop.call_later(seconds, call)

    def _hello_is_late(self) -> None:
        self._on_bad(self, f"no hello within {HELLO_SECONDS:g} s")

    def _on_lost(self, reason: str) -> None:
        self._set_timer(None)
        log.debug("session ended", job=self.job, replica_id=self.replica_id, session=self.number, reason=reason)
        shell, self._shell = self._shell, None
        self._ending = True
        if shell is not None:
            shell.handle(Closed(self.number))
        self._on_end(self)
