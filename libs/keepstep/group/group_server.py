"""Rank 0's side of a group: the ranks ask and vote here, and the group speaks with one voice.

Duties, in order: take every rank's request, merge them, ask the lighthouse, answer all; take every rank's vote,
answer all with the one decision; pass on what the lighthouse pushes. A rank whose connection ends without goodbye, or
that is silent for ``rank_silence``, fails the whole group: the lighthouse is told, every rank is told, and each
process ends so that its launcher restarts it. The same server holds the table over which members of a quorum meet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus

from aiohttp import WSMsgType, web

from keepstep.group.merging import CommitBarrier, DisagreeError, GroupAsk, merge_asks, merge_healing
from keepstep.group.quorum_plan import make_plan
from keepstep.group.rank_link import CLOSE_SECONDS, RANK_SILENCE, GroupSettings, Leaving, denial, denied, rank_beats
from keepstep.group.rank_lists import ListSender
from keepstep.group.slow_quorum_log import SlowQuorumLog
from keepstep.rendezvous.key_value_server import VERSION as RENDEZVOUS_VERSION
from keepstep.rendezvous.key_value_server import KeyValueServer
from keepstep.runtime.owned_tasks import OwnedTasks
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError, ProtocolError, SessionClosed
from keepstep_mesh.net.addresses import in_url
from keepstep_mesh.net.fork_safety import listening_socket
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import RankAsk, RankDecision, RankHello, RankQuorum, RankReady, RankVote
from keepstep_mesh.protocol.membership import MemberInfo, Quorum
from keepstep_mesh.protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Evicted,
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
from keepstep_mesh.security.tokens import ClientToken, is_loopback
from keepstep_mesh.security.web_pages import HOST_ADVICE, host_problem, origin_problem
from keepstep_mesh.serving.open_port import FIRST_REQUEST_SECONDS, FirstRequestLimit
from keepstep_mesh.session.lighthouse_session import LighthouseSession
from keepstep_mesh.session.session_events import Connected, Disconnected, Push
from keepstep_mesh.session.session_settings import SessionSettings

log = get_logger("keepstep.group")

HELLO_DEADLINE = 10.0
LEAVE_PATIENCE = 1.0
"""How long a group that is to leave waits for the answer to a request that is open."""
LEAVE_SECONDS = 5.0
"""How long it waits for the lighthouse to take its goodbye."""


class _Rank:
    """One connected rank, as the server sees it."""

    def __init__(self, hello: RankHello, socket: web.WebSocketResponse, now: float) -> None:
        self.rank = hello.group_rank
        self.socket = socket
        self.heard = now
        self.said_goodbye = False
        self._keeps_list = hello.keeps_list
        self._list_sent = 0
        """Number of the member list that this connection carried last; 0: none."""

    async def send(self, message: codec.Message) -> None:
        await self._send_frame(codec.encode(message))

    async def send_quorum(self, answer: RankQuorum, lists: ListSender) -> None:
        frame, number = lists.frame(answer, self._list_sent)
        if self._keeps_list:
            self._list_sent = number
        await self._send_frame(frame)

    async def _send_frame(self, frame: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # its reader sees the same end and reports it
            await self.socket.send_bytes(frame)


class GroupServer:
    """Rank 0's side of a group, and its link (``RankLink``).

    Args:
        settings: who the group is and where it listens.
        session: with the lighthouse, under the group's replica_id. Its token is that of ranks and peers too.
        on_failed: called once, on the loop, when the group is lost as a whole.
        on_push: what the lighthouse pushes, for this rank; the others get it over their connections.
    """

    def __init__(
        self,
        settings: GroupSettings,
        session: SessionSettings,
        on_failed: Callable[[str], None],
        on_push: Callable[[Push], None],
    ) -> None:
        self.replica_id = session.replica_id
        self.key_values: KeyValueServer | None = (served := KeyValueServer())
        self._served = served
        self.layout_lines: list[str] = []
        """Rank 0's parameters, for a peer that wants to know where its own differ."""
        self._job_settings = ""
        """Of the last request."""
        self._settings = settings
        self._job = session.job
        self._token = ClientToken.of(session.token)
        self._session = LighthouseSession(session, self._pushed)
        self._on_failed = on_failed
        self._on_push = on_push
        self._barrier = CommitBarrier(settings.world_size)
        self._asks: dict[int, tuple[RankAsk, asyncio.Future[RankQuorum]]] = {}
        self._in_round: dict[int, tuple[RankAsk, asyncio.Future[RankQuorum]]] = {}
        """The requests that the open round answers."""
        self._votes: dict[int, tuple[RankVote, asyncio.Future[bool]]] = {}
        self._ranks: dict[int, _Rank] = {}
        self._lists = ListSender()
        self._gone: set[int] = set()
        self._info = MemberInfo()
        self._checkpoints: dict[int, str] = {}
        self._attempt = 0
        self._last: Quorum | None = None
        """The last quorum of the group."""
        self._heals: dict[int, Healing] = {}
        """What each rank last said of its heal, since the last request."""
        self._failed = ""
        self._leaving = False
        self._requesting = False
        self._wish = ""
        """Why the group left in the middle of a request."""
        self._tasks = OwnedTasks(self._broke)
        self._impatience = SlowQuorumLog(self._session, session.replica_id, self._tasks.start)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._on_loopback = False
        self.address = ""

    # ---- life

    async def start(self, connect: bool = True) -> None:
        """Listens, then opens the lighthouse session. OSError when the port is taken."""
        limit = FirstRequestLimit(FIRST_REQUEST_SECONDS)
        app = web.Application(middlewares=[limit.middleware, self._authorize], client_max_size=2 * 1024 * 1024)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/v1/ranks", self._serve_rank),
                web.get("/v1/ranks/{rank}/checkpoint", self._serve_checkpoint),
                web.get("/v1/layout", self._serve_layout),
                *self._served.routes(),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        host, port = self._settings.host, self._settings.port
        try:
            listener = listening_socket(host, port)  # blocks only for a name, and nothing else runs on this loop yet
            self._server = await asyncio.get_running_loop().create_server(limit.acceptor(self._runner), sock=listener)
            bound, port = self._server.sockets[0].getsockname()[:2]
            self._on_loopback = is_loopback(bound)
            self.address = f"http://{in_url(host)}:{port}"
            if connect:
                await self._session.start()
            if self._settings.world_size > 1:
                self._tasks.start(self._watch_ranks())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Says goodbye to the ranks, unless the group is lost, and stops listening. The lighthouse session just ends,
        unless ``leave`` came before.
        """
        self._leaving = True
        await self._tasks.close()
        for peer in tuple(self._ranks.values()):
            if not self._failed:
                await peer.send(Goodbye())
            await peer.socket.close()
        self._deny_asks("closed", "the group server was shut down")
        self._served.close()
        await self._session.close()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _broke(self, error: BaseException) -> None:
        log.error("the group server broke", replica_id=self.replica_id, exc_info=error)
        self._tasks.start(self.fail(f"the group server broke: {error!r}"))

    # ---- what rank 0 does itself (RankLink)

    @property
    def services(self) -> tuple[ServiceAddress, ...]:
        return self._session.services

    async def ask(self, ask: RankAsk) -> RankQuorum:
        return await self._ask(0, ask)

    async def vote(self, vote: RankVote, timeout: float) -> bool:
        future = self._vote(0, vote)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            missing = self._barrier.waiting_for()
            raise TimeoutError(f"waited {timeout:g} s for ranks {missing} of this group to vote") from None

    def finished_step(self) -> None:
        self._session.finished_step()

    def healing(self, progress: Healing) -> None:
        self._rank_heals(0, progress)

    def _rank_heals(self, rank: int, progress: Healing) -> None:
        self._heals[rank] = progress
        self._session.healing(merge_healing(self._heals, self._settings.world_size))

    def wish_to_leave(self, reason: str) -> None:
        asyncio.get_running_loop().call_later(LEAVE_PATIENCE, self._leave_open_request, reason)

    def _leave_open_request(self, reason: str) -> None:
        """The groups that should answer may have left already: then there is no next step to leave at."""
        if self._requesting:
            self._wish = reason
            self._tasks.start(self._leave_anyway(reason, LEAVE_SECONDS))

    async def _leave_anyway(self, reason: str, timeout: float) -> None:
        try:
            await self.leave(reason, timeout)
        except (TimeoutError, KeepstepError, OSError) as error:
            log.warning("could not say goodbye; leaving all the same", error=str(error))
            await self._session.close()

    async def leave(self, reason: str, timeout: float) -> None:
        self._leaving = True
        await self._session.leave(reason, timeout)

    async def fail(self, reason: str) -> None:
        """The group is lost: tells the lighthouse and every rank, then ``on_failed``."""
        if self._failed or self._leaving:
            return
        self._failed = reason
        log.error("group lost", replica_id=self.replica_id, reason=reason)
        for peer in tuple(self._ranks.values()):
            await peer.send(Failed(reason))
        try:
            await self._session.failed(reason, 0.3)
        except (TimeoutError, KeepstepError, OSError) as error:
            log.warning("could not tell the lighthouse; it will notice", error=str(error))
        self._on_failed(reason)

    # ---- requests

    async def _ask(self, rank: int, ask: RankAsk) -> RankQuorum:
        self._checkpoints[rank] = ask.checkpoint
        if self._settings.world_size == 1:
            return await self._request({0: ask})
        if self._gone:
            raise SessionClosed(f"ranks {sorted(self._gone)} of this group have left it; restart the group")
        future: asyncio.Future[RankQuorum] = asyncio.get_running_loop().create_future()
        asks = self._in_round or self._asks
        if rank in asks:  # it gave up on that one
            asks[rank][1].cancel()
        asks[rank] = (ask, future)
        if len(self._asks) == self._settings.world_size:
            self._in_round, self._asks = self._asks, {}
            self._tasks.start(self._round(self._in_round))
        try:
            async with asyncio.timeout(ask.timeout_ms / 1000 * (1 + self._settings.quorum_retries) + 1.0):
                return await asyncio.shield(future)
        except TimeoutError:
            if self._asks.get(rank, (ask, None))[1] is not future:
                return await future  # the round is on, and has a deadline of its own
            missing = [r for r in range(self._settings.world_size) if r not in self._asks]
            reason = f"waited {ask.timeout_ms / 1000:g} s for ranks {missing} of this group to start the step"
            self._deny_asks("deadline", reason)
            raise TimeoutError(reason) from None

    def _deny_asks(self, code: str, reason: str) -> None:
        asks, self._asks = self._asks, {}
        for _, future in asks.values():
            if not future.done():
                future.set_exception(denial(code, reason))
                future.exception()  # whoever still waits gets it; nobody has to

    async def _round(self, asks: dict[int, tuple[RankAsk, asyncio.Future[RankQuorum]]]) -> None:
        try:
            answer = await self._request({rank: ask for rank, (ask, _) in asks.items()})
        except asyncio.CancelledError:
            for _, future in asks.values():
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  every rank gets the same answer, whatever it is
            for _, future in asks.values():
                if not future.done():
                    future.set_exception(error)
                    future.exception()
            return
        finally:
            self._in_round = {}
        for ask, future in asks.values():
            if not future.done():
                future.set_result(replace(answer, request=ask.request))

    async def _request(self, asks: dict[int, RankAsk]) -> RankQuorum:
        merged = self._merge(asks)
        if merged.leaving:
            await self._leave_anyway(merged.leaving, min(merged.timeout, LEAVE_SECONDS))
            raise Leaving(merged.leaving)
        self._attempt += 1
        self._heals = {}
        self._job_settings = merged.settings
        info = MemberInfo(
            address=self.address,
            store_address=self._settings.store_address or self.address,
            world_size=self._settings.world_size,
            layout=merged.layout,
            handles=merged.handles,
            rendezvous=RENDEZVOUS_VERSION,
        )
        if info != self._info:  # else the very one of before: the session need not look at it again
            self._info = info
        for left in range(self._settings.quorum_retries, -1, -1):
            self._requesting = True
            try:
                with self._impatience.waiting():
                    quorum = await self._session.quorum(
                        step=merged.step,
                        lineage=merged.lineage,
                        shrink_only=merged.shrink_only,
                        commit_failures=merged.commit_failures,
                        info=self._info,
                        timeout=merged.timeout,
                        root=merged.root,
                        batches_committed=merged.batches_committed,
                        allow_heal=merged.allow_heal,
                        settings=merged.settings,
                    )
                break
            except TimeoutError as error:
                if not left:
                    raise
                log.warning("no quorum, asking again", retries_left=left, reason=str(error))
            except SessionClosed as error:
                if self._wish:
                    raise Leaving(self._wish) from error
                raise
            finally:
                self._requesting = False
        if self._last is None or self._last.quorum_id != quorum.quorum_id or self._last.epoch != quorum.epoch:
            self._served.drop_before(self._job, quorum.epoch, quorum.quorum_id)
        self._last = quorum
        heal_timeout_ms = self._session.heal_timeout_ms
        return RankQuorum(asks[0].request, self._attempt, quorum, heal_timeout_ms=heal_timeout_ms)

    def _merge(self, asks: dict[int, RankAsk]) -> GroupAsk:
        """Ranks may differ after a heal; whether there was one is looked up only then, because it costs O(members)."""
        try:
            return merge_asks(asks, self.replica_id)
        except DisagreeError:
            if self._last is None or not make_plan(self._last, self.replica_id).heal:
                raise
            return merge_asks(asks, self.replica_id, healed=True)

    # ---- votes

    def _vote(self, rank: int, vote: RankVote) -> asyncio.Future[bool]:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if rank in self._votes:  # it gave up on that one
            self._votes[rank][1].cancel()
        self._votes[rank] = (vote, future)
        decision = self._barrier.vote(rank, vote)
        if decision is not None:
            key = (decision.epoch, decision.quorum_id, decision.step, decision.attempt)
            for other, (cast, waiting) in tuple(self._votes.items()):
                if (cast.epoch, cast.quorum_id, cast.step, cast.attempt) == key:
                    del self._votes[other]
                    if not waiting.done():
                        waiting.set_result(decision.ok)
        return future

    # ---- the other ranks

    async def _serve_rank(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(timeout=CLOSE_SECONDS, max_msg_size=codec.MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HELLO_DEADLINE):
                hello = codec.decode(await socket.receive_bytes())
            self._check_hello(hello)
        except (ProtocolError, TimeoutError, TypeError) as error:
            with contextlib.suppress(ConnectionError):  # it hung up without a word
                await socket.send_bytes(codec.encode(Refused("bad_message", str(error) or "no hello in time")))
            await socket.close()
            return socket
        assert isinstance(hello, RankHello)
        peer = _Rank(hello, socket, loop.time())
        self._ranks[peer.rank] = peer
        await peer.send(RankReady(PROTOCOL_VERSION, self.replica_id))
        await peer.send(Services(self.services))
        await peer.send(self._timing())
        try:
            await self._read_rank(peer)
        finally:
            if self._ranks.get(peer.rank) is peer:
                del self._ranks[peer.rank]
            if not peer.said_goodbye and not self._leaving:
                self._tasks.start(
                    self.fail(f"rank {peer.rank} of {self._settings.world_size} died: its connection ended")
                )
        return socket

    def _check_hello(self, hello: object) -> None:
        if not isinstance(hello, RankHello):
            raise ProtocolError("the first message of a rank must be rank_hello")
        if hello.version < OLDEST_PROTOCOL_VERSION or hello.oldest_version > PROTOCOL_VERSION:
            raise ProtocolError(f"rank {hello.group_rank} runs another version of keepstep; install one for all ranks")
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

    async def _read_rank(self, peer: _Rank) -> None:
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
                case RankVote():
                    self._tasks.start(self._answer_vote(peer, message))
                case Healing():
                    self._rank_heals(peer.rank, message)
                case Leave():
                    peer.said_goodbye = True
                    self._gone.add(peer.rank)
                    await peer.send(Goodbye())
                    self._deny_asks("closed", f"rank {peer.rank} has left this group: {message.reason}")
                    return
                case Failed():
                    await self.fail(message.reason)
                case _:
                    pass

    async def _answer_ask(self, peer: _Rank, ask: RankAsk) -> None:
        try:
            answer = await self._ask(peer.rank, ask)
        except Exception as error:  # noqa: BLE001  the rank waits for an answer, whatever it is
            await peer.send(denied(ask.request, error))
        else:
            await peer.send_quorum(answer, self._lists)

    async def _answer_vote(self, peer: _Rank, vote: RankVote) -> None:
        ok = await self._vote(peer.rank, vote)
        await peer.send(RankDecision(vote.epoch, vote.quorum_id, vote.step, vote.attempt, ok))

    async def _watch_ranks(self) -> None:
        loop = asyncio.get_running_loop()
        told = self._timing()
        async for slept in rank_beats():
            before, told = told, self._timing()
            for peer in tuple(self._ranks.values()):
                if slept:
                    peer.heard = loop.time()
                silent = loop.time() - peer.heard
                if silent > self.rank_silence:
                    await self.fail(f"rank {peer.rank} was silent for {silent:.1f} s")
                    return
                await peer.send(Heartbeat())
                if told != before:
                    await peer.send(told)

    @property
    def rank_silence(self) -> float:
        """Seconds of silence after which a rank counts as dead. A change of the job's policy counts at once."""
        return max(RANK_SILENCE, self._session.liveness.timeout)

    def _timing(self) -> Timing:
        return Timing(0, round(self._session.liveness.timeout * 1000), 0)

    def _pushed(self, push: Push) -> None:
        if isinstance(push, Evicted):
            self._leaving = True  # its ranks end, one after the other, and none has failed
        self._on_push(push)
        if not isinstance(push, (Connected, Disconnected)):
            for peer in tuple(self._ranks.values()):
                self._tasks.start(peer.send(push))

    # ---- what peers read

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self._token:
            own = (self._settings.host,)
            wrong = host_problem(request.headers.get("Host"), own, HOST_ADVICE) if self._on_loopback else None
            if wrong is not None:
                return Problem(HTTPStatus.MISDIRECTED_REQUEST, wrong).response()
            if (wrong := origin_problem(request.headers.get("Origin"), own)) is not None:
                return Problem(HTTPStatus.FORBIDDEN, wrong).response()
        if request.path != "/healthz" and not self._token.accepts_peer(request.headers.get("Authorization", "")):
            return Problem(HTTPStatus.UNAUTHORIZED, "wrong or missing token").response()
        return await handler(request)

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "replica_id": self.replica_id})

    async def _serve_checkpoint(self, request: web.Request) -> web.Response:
        try:
            metadata = self._checkpoints[int(request.match_info["rank"])]
        except (KeyError, ValueError):
            rank = request.match_info["rank"]
            return Problem(HTTPStatus.NOT_FOUND, f"no rank {rank} has asked for a quorum here").response()
        return web.json_response({"metadata": metadata})

    async def _serve_layout(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {"replica_id": self.replica_id, "settings": self._job_settings, "lines": self.layout_lines}
        )
