"""Rank 0's connections to the other ranks of its group: greet them, read from them, notice when one dies."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from typing import Protocol

from aiohttp import web

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.gathering import GatheredAsks, GatheredVotes
from keepstep.group.ranks.rank_link import GroupSettings, denied, rank_liveness, silence_limit
from keepstep.group.ranks.rank_lists import ListSender
from keepstep.runtime.owned_tasks import OwnedTasks
from keepstep.session.message_channel import CLOSE_SECONDS, MessageChannel
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import (
    Compared,
    ComparedRequest,
    RankAsk,
    RankDecision,
    RankHello,
    RankQuorum,
    RankReady,
    RankVote,
)
from keepstep_mesh.protocol.messages import (
    PROTOCOL_VERSION,
    CancelRequest,
    Drain,
    Failed,
    Goodbye,
    Healing,
    Leave,
    Refused,
    ServiceAddress,
    Services,
    ShardReport,
    Timing,
)
from keepstep_mesh.protocol.stack_messages import RankStacks

log = get_logger("keepstep.group")

HELLO_DEADLINE = 10.0
"""Seconds from the connection to the rank's hello."""
COMPARED_SECONDS = 3.0
"""Limit for the answer of a rank to a ``ComparedRequest``."""


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

    def healing_of(self, rank: int, progress: Healing) -> None:
        """Take a rank's report on its heal."""

    def shards_of(self, rank: int, report: ShardReport) -> None:
        """Take a rank's report on its shard."""

    def stacks(self, found: RankStacks) -> None:
        """Pass the stacks of a rank on to the lighthouse."""

    def request_leave(self, reason: str) -> None:
        """Prepare to leave at the next step, because a signal ends a rank."""

    async def fail(self, reason: str) -> None:
        """The group is lost."""

    def on_broken(self, error: BaseException) -> None:
        """The group is lost by a bug of the group server."""


class RankConnections:
    """The connected ranks, by their number. All methods run on one loop.

    Args:
        host: the group server.
        settings: of the group.
        asks, votes: of all ranks.
        tasks: owns the tasks that are started here.
    """

    def __init__(
        self, host: RankHost, settings: GroupSettings, asks: GatheredAsks, votes: GatheredVotes, tasks: OwnedTasks
    ) -> None:
        self.host = host
        self.asks = asks
        self.votes = votes
        self.tasks = tasks
        self.lists = ListSender()
        self._settings = settings
        self._ranks: dict[int, _Rank] = {}
        self._sent_timing: Timing | None = None
        self._compared: dict[int, asyncio.Future[Compared]] = {}
        """Answers that are waited for, by the number of the request."""
        self._numbers = itertools.count(1)

    async def compared_of(self, rank: int) -> Compared | None:
        """Ask a rank what the groups compare of it. None: it is not connected, or does not answer."""
        peer, number = self._ranks.get(rank), next(self._numbers)
        if peer is None:
            return None
        answer: asyncio.Future[Compared] = asyncio.get_running_loop().create_future()
        self._compared[number] = answer
        peer.channel.send(ComparedRequest(number))
        try:
            async with asyncio.timeout(COMPARED_SECONDS):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._compared[number]

    def answered(self, compared: Compared) -> None:
        """Take the answer of a rank. An answer that comes too late is dropped."""
        answer = self._compared.get(compared.number)
        if answer is not None and not answer.done():
            answer.set_result(compared)

    # ---- to all ranks

    def send(self, message: codec.Message) -> None:
        """Send ``message`` to every connected rank."""
        for peer in tuple(self._ranks.values()):
            peer.channel.send(message)

    def timing_changed(self) -> None:
        """Tell all ranks the heartbeat timeout of the job, if it has changed."""
        timing = self._timing()
        if timing != self._sent_timing:
            self._sent_timing = timing
            for peer in self._ranks.values():
                peer.channel.liveness.timeout = self.silence
            self.send(timing)

    async def close(self, *, goodbye: bool) -> None:
        """Close every connection, after a goodbye if ``goodbye``."""
        links = []
        for peer in tuple(self._ranks.values()):
            if goodbye:
                peer.channel.send(Goodbye())
            peer.channel.link.close()
            links.append(peer.channel.link)
        if links:
            await asyncio.wait([link.closed for link in links], timeout=CLOSE_SECONDS)
        for link in links:
            link.abort("the rank does not read the last messages")

    @property
    def silence(self) -> float:
        """Seconds without a message after which a rank counts as dead; follows the job's policy."""
        return silence_limit(self.host.heartbeat_timeout)

    def _timing(self) -> Timing:
        return Timing(0, round(self.host.heartbeat_timeout * 1000), 0)

    # ---- one rank

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Handle the connection of one rank, until it ends."""
        peer = _Rank(self)
        response = await peer.channel.link.accept(request)
        late = f"no rank_hello within {HELLO_DEADLINE:g} s"
        timer = asyncio.get_running_loop().call_later(HELLO_DEADLINE, peer.refuse, late)
        try:
            await peer.channel.link.closed
        finally:
            timer.cancel()
            peer.channel.link.abort("the group server ends")
        return response

    def greet(self, peer: _Rank, hello: RankHello) -> None:
        """Take the rank into the group. Raises ``ProtocolError`` if it does not belong to it."""
        self._check_hello(hello)
        self._ranks[hello.group_rank] = peer
        self.asks.rank_came(hello.group_rank)
        peer.channel.send(RankReady(PROTOCOL_VERSION, self.host.replica_id))
        peer.channel.send(Services(self.host.services))
        peer.channel.send(self._timing())
        peer.channel.watch()

    def ended(self, rank: int, *, said_goodbye: bool) -> None:
        """Note that the connection of a rank has ended."""
        del self._ranks[rank]
        if not said_goodbye:
            self.lost(rank, f"rank {rank} of {self._settings.world_size} died: its connection ended")

    def lost(self, rank: int, reason: str) -> None:
        """Fail the group. A group that ends or was refused has not failed, but cannot ask again without this rank."""
        if self.host.leaving:
            self.asks.rank_left(rank, reason)
        else:
            self.tasks.start(self.host.fail(reason))

    def _check_hello(self, hello: RankHello) -> None:
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


class _Rank:
    """The connection of one rank."""

    def __init__(self, group: RankConnections) -> None:
        self._group = group
        self._host = group.host
        self._rank = -1
        """Set by the hello."""
        self._said_goodbye = False
        self._keeps_list = False
        self._list_sent = 0
        """Number of the member list that was last sent on this connection; 0: none."""
        self.channel = MessageChannel(
            rank_liveness(group.host.heartbeat_timeout),
            on_message=self._on_message,
            on_bad=self._on_bad,
            on_silent=self._on_silent,
            on_lost=self._on_lost,
            limit_bytes=codec.MAX_FRAME_BYTES,
            unsent_bytes=codec.MAX_SERVER_FRAME_BYTES,
        )

    def refuse(self, reason: str) -> None:
        """Close the connection of a rank that has not said a valid hello."""
        if self._rank < 0:
            self.channel.send(Refused("bad_message", reason))
            self.channel.link.close(reason=reason)

    def _on_message(self, message: codec.Message) -> None:
        match message:
            case _ if self._rank < 0:
                self._greet(message)
            case RankAsk():
                self._group.tasks.start(self._answer_ask(message))
            case RankVote():
                decision = self._group.votes.cast(self._rank, message)
                decision.add_done_callback(partial(self._answer_vote, message))
            case CancelRequest(request):
                self._group.asks.withdraw(self._rank, request)
            case Healing():
                self._host.healing_of(self._rank, message)
            case ShardReport():
                self._host.shards_of(self._rank, message)
            case RankStacks():
                self._host.stacks(replace(message, rank=self._rank))
            case Compared():
                self._group.answered(message)
            case Leave():
                self._said_goodbye = True
                self._group.asks.rank_left(self._rank, message.reason)
                self.channel.send(Goodbye())
                self.channel.link.close()
            case Drain(reason):
                self._host.request_leave(reason)
            case Failed():
                self._group.tasks.start(self._host.fail(message.reason))
            case _:
                pass

    def _greet(self, message: codec.Message) -> None:
        if not isinstance(message, RankHello):
            raise ProtocolError(f"first message of a rank is {type(message).__name__}, expected RankHello")
        self._group.greet(self, message)
        self._rank, self._keeps_list = message.group_rank, message.keeps_list

    def _on_bad(self, error: Exception) -> None:
        if not isinstance(error, ProtocolError):
            self._host.on_broken(error)
        elif self._rank < 0:
            self.refuse(str(error))
        else:
            log.error("bad message from a rank", rank=self._rank, error=str(error))
            self.channel.link.close(reason=f"bad message: {error}")

    def _on_silent(self, seconds: float) -> None:
        self._group.lost(self._rank, f"rank {self._rank} was silent for {seconds:.1f} s")

    def _on_lost(self, _reason: str) -> None:
        if self._rank >= 0:
            self._group.ended(self._rank, said_goodbye=self._said_goodbye)

    async def _answer_ask(self, ask: RankAsk) -> None:
        try:
            plan = await self._host.ask_of(self._rank, ask)
        except Exception as error:  # noqa: BLE001  the rank waits for an answer, whatever the error is
            self.channel.send(denied(ask.request, error))
        else:
            answer = RankQuorum(ask.request, plan.attempt, plan.quorum, heal_timeout_ms=plan.heal_timeout_ms)
            frame, number = self._group.lists.frame(answer, self._list_sent)
            if self._keeps_list:
                self._list_sent = number
            self.channel.send_frame(frame)

    def _answer_vote(self, vote: RankVote, decision: asyncio.Future[bool]) -> None:
        if not decision.cancelled():
            ok = decision.result()
            self.channel.send(RankDecision(vote.epoch, vote.quorum_id, vote.step, vote.attempt, ok, vote.poll))
