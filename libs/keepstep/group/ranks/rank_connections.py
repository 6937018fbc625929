"""Rank 0's connections to the other ranks of its group: greet them, read from them, notice when one dies."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from aiohttp import WSMsgType, web

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.rank_link import RANK_CLOSE_SECONDS, RANK_SILENCE, GroupSettings, denied, rank_beats
from keepstep.group.ranks.rank_lists import ListSender
from keepstep.runtime.owned_tasks import OwnedTasks
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import RankAsk, RankDecision, RankHello, RankQuorum, RankReady, RankVote
from keepstep_mesh.protocol.messages import (
    PROTOCOL_VERSION,
    CancelRequest,
    Failed,
    Goodbye,
    Healing,
    Heartbeat,
    Leave,
    Refused,
    ServiceAddress,
    Services,
    Timing,
)

log = get_logger("keepstep.group")

HELLO_DEADLINE = 10.0
"""Seconds from the connection to the rank's hello."""


class RankHost(Protocol):
    """The part of the group server that the connections use."""

    replica_id: str

    @property
    def services(self) -> tuple[ServiceAddress, ...]: ...

    @property
    def leaving(self) -> bool:
        """Whether ranks may disconnect without a goodbye, because the group ends."""

    @property
    def heartbeat_timeout(self) -> float:
        """Of the job, in seconds."""

    async def ask_of(self, rank: int, ask: RankAsk) -> QuorumPlan:
        """Add the request of a rank, and wait for the group's plan."""

    def withdraw_of(self, rank: int, request: int) -> None:
        """Take back a request of a rank."""

    def vote_of(self, rank: int, vote: RankVote) -> asyncio.Future[bool]:
        """Count the vote of a rank. The future completes with the group's decision."""

    def healing_of(self, rank: int, progress: Healing) -> None:
        """Take a rank's report on its heal."""

    def rank_came(self, rank: int) -> None:
        """A rank has connected."""

    def rank_left(self, rank: int, reason: str) -> None:
        """A rank has said goodbye, or is lost while the group ends."""

    async def fail(self, reason: str) -> None:
        """The group is lost."""


class _Rank:
    """One connected rank."""

    def __init__(self, hello: RankHello, socket: web.WebSocketResponse, now: float) -> None:
        self.rank = hello.group_rank
        self.socket = socket
        self.heard = now
        self.said_goodbye = False
        self._keeps_list = hello.keeps_list
        self._list_sent = 0
        """Number of the member list that was last sent on this connection; 0: none."""

    async def send(self, message: codec.Message) -> None:
        await self._send_frame(codec.encode(message))

    async def send_quorum(self, answer: RankQuorum, lists: ListSender) -> None:
        frame, number = lists.frame(answer, self._list_sent)
        if self._keeps_list:
            self._list_sent = number
        await self._send_frame(frame)

    async def _send_frame(self, frame: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the reader of this connection reports it
            await self.socket.send_bytes(frame)


class RankConnections:
    """The connected ranks, by their number. All methods run on one loop.

    Args:
        host: the group server.
        settings: of the group.
        tasks: owns the tasks that are started here.
    """

    def __init__(self, host: RankHost, settings: GroupSettings, tasks: OwnedTasks) -> None:
        self._host = host
        self._settings = settings
        self._tasks = tasks
        self._lists = ListSender()
        self._ranks: dict[int, _Rank] = {}

    # ---- to all ranks

    async def send(self, message: codec.Message) -> None:
        """Send ``message`` to every connected rank."""
        for peer in tuple(self._ranks.values()):
            await peer.send(message)

    def push(self, message: codec.Message) -> None:
        """Send ``message`` to every connected rank in the background, so that a slow rank delays no other."""
        for peer in tuple(self._ranks.values()):
            self._tasks.start(peer.send(message))

    async def close(self, *, goodbye: bool) -> None:
        """Close every connection, after a goodbye if ``goodbye``."""
        for peer in tuple(self._ranks.values()):
            if goodbye:
                await peer.send(Goodbye())
            await peer.socket.close()

    @property
    def silence(self) -> float:
        """Seconds without a message after which a rank counts as dead; follows the job's policy."""
        return max(RANK_SILENCE, self._host.heartbeat_timeout)

    async def watch(self) -> None:
        """Send heartbeats, and fail the group when a rank is silent for too long. Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        sent = self._timing()
        async for slept in rank_beats():
            before, sent = sent, self._timing()
            for peer in tuple(self._ranks.values()):
                if slept:
                    peer.heard = loop.time()
                silent = loop.time() - peer.heard
                if silent > self.silence:
                    await self._lost(peer.rank, f"rank {peer.rank} was silent for {silent:.1f} s")
                    if not self._host.leaving:
                        return
                await peer.send(Heartbeat())
                if sent != before:
                    await peer.send(sent)

    def _timing(self) -> Timing:
        return Timing(0, round(self._host.heartbeat_timeout * 1000), 0)

    # ---- one rank

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Handle the connection of one rank, until it ends."""
        socket = web.WebSocketResponse(timeout=RANK_CLOSE_SECONDS, max_msg_size=codec.MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HELLO_DEADLINE):
                hello = codec.decode(await socket.receive_bytes())
            self._check_hello(hello)
        except (ProtocolError, TimeoutError, TypeError) as error:
            with contextlib.suppress(ConnectionError):  # it has hung up
                reason = str(error) or f"no rank_hello within {HELLO_DEADLINE:g} s"
                await socket.send_bytes(codec.encode(Refused("bad_message", reason)))
            await socket.close()
            return socket
        assert isinstance(hello, RankHello)
        peer = _Rank(hello, socket, loop.time())
        self._ranks[peer.rank] = peer
        self._host.rank_came(peer.rank)
        await peer.send(RankReady(PROTOCOL_VERSION, self._host.replica_id))
        await peer.send(Services(self._host.services))
        await peer.send(self._timing())
        try:
            await self._read(peer)
        finally:
            if self._ranks.get(peer.rank) is peer:
                del self._ranks[peer.rank]
            if not peer.said_goodbye:
                died = f"rank {peer.rank} of {self._settings.world_size} died: its connection ended"
                self._tasks.start(self._lost(peer.rank, died))
        return socket

    async def _lost(self, rank: int, reason: str) -> None:
        """Fail the group. A group that ends or was refused has not failed, but cannot ask again without this rank."""
        if self._host.leaving:
            self._host.rank_left(rank, reason)
        else:
            await self._host.fail(reason)

    def _check_hello(self, hello: object) -> None:
        if not isinstance(hello, RankHello):
            raise ProtocolError(f"first message of a rank is {type(hello).__name__}, expected RankHello")
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"rank {hello.group_rank} speaks protocol {hello.version}, rank 0 {PROTOCOL_VERSION}: install the same "
                f"version of keepstep for all ranks of a group"
            )
        size, lowest = self._settings.world_size, 0 if self._settings.rank_0_connects else 1
        if hello.world_size not in (0, size) or not lowest <= hello.group_rank < size:
            raise ProtocolError(f"rank {hello.group_rank} of {hello.world_size} asks to join a group of {size}")
        if hello.restart != self._settings.restart:
            raise ProtocolError(
                f"rank {hello.group_rank} belongs to restart {hello.restart} of this group, rank 0 to "
                f"{self._settings.restart}"
            )
        if hello.group_rank in self._ranks:
            raise ProtocolError(f"rank {hello.group_rank} is connected already; two processes have the same RANK")

    async def _read(self, peer: _Rank) -> None:
        loop = asyncio.get_running_loop()
        async for frame in peer.socket:
            if frame.type is not WSMsgType.BINARY:
                return
            peer.heard = loop.time()
            try:
                message = codec.decode(frame.data)
            except ProtocolError as error:
                log.error("bad message from a rank", rank=peer.rank, error=str(error))
                return
            match message:
                case RankAsk():
                    self._tasks.start(self._answer_ask(peer, message))
                case CancelRequest(request):
                    self._host.withdraw_of(peer.rank, request)
                case RankVote():
                    self._tasks.start(self._answer_vote(peer, message))
                case Healing():
                    self._host.healing_of(peer.rank, message)
                case Leave():
                    peer.said_goodbye = True
                    self._host.rank_left(peer.rank, message.reason)
                    await peer.send(Goodbye())
                    return
                case Failed():
                    await self._host.fail(message.reason)
                case _:
                    pass

    async def _answer_ask(self, peer: _Rank, ask: RankAsk) -> None:
        try:
            plan = await self._host.ask_of(peer.rank, ask)
        except Exception as error:  # noqa: BLE001  the rank waits for an answer, whatever the error is
            await peer.send(denied(ask.request, error))
        else:
            answer = RankQuorum(ask.request, plan.attempt, plan.quorum, heal_timeout_ms=plan.heal_timeout_ms)
            await peer.send_quorum(answer, self._lists)

    async def _answer_vote(self, peer: _Rank, vote: RankVote) -> None:
        ok = await self._host.vote_of(peer.rank, vote)
        await peer.send(RankDecision(vote.epoch, vote.quorum_id, vote.step, vote.attempt, ok, vote.poll))
