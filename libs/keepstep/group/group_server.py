"""Rank 0's side of a group: it merges the requests and votes of all ranks, and speaks to the lighthouse for them.

Duties, in order: take every rank's request, merge them, ask the lighthouse, answer all ranks; take every rank's vote,
answer all ranks with the one decision; pass on what the lighthouse pushes. When the connection of a rank ends without a
goodbye, or a rank is silent for too long, the whole group fails: the lighthouse and every rank learn it, and each
process ends so that its launcher restarts it. The same server holds the table over which members of a quorum meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

from keepstep.group.agreement import StepValues
from keepstep.group.group_listener import GroupListener
from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.group.ranks.gathering import GatheredAsks, GatheredVotes
from keepstep.group.ranks.merging import DisagreeError, merge_asks, merge_healing, merge_shards
from keepstep.group.ranks.rank_connections import RankConnections
from keepstep.group.ranks.rank_link import GroupSettings, Leaving
from keepstep.group.slow_quorum_log import SlowQuorumLog
from keepstep.rendezvous.key_value_server import VERSION as RENDEZVOUS_VERSION
from keepstep.rendezvous.key_value_server import KeyValueServer
from keepstep.runtime.exits import leave_cause
from keepstep.runtime.owned_tasks import OwnedTasks
from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_events import Connected, Disconnected, Push
from keepstep.session.session_settings import SessionSettings
from keepstep.stacks.activity import Activity
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import (
    Banned,
    KeepstepError,
    LayoutMismatch,
    ReplicasDiverged,
    SessionClosed,
    StartRefused,
)
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.group_messages import RankAsk, RankVote
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import (
    Evicted,
    Failed,
    Healing,
    Quorum,
    QuorumRequest,
    ServiceAddress,
    ShardReport,
)
from keepstep_mesh.protocol.records import copier, maker
from keepstep_mesh.protocol.stack_messages import Hung, RankStacks
from keepstep_mesh.security.tokens import ClientToken

log = get_logger("keepstep.group")

LEAVE_PATIENCE = 1.0
"""Seconds that a group that is asked to leave waits for the answer to an open request."""
LEAVE_SECONDS = 5.0
"""Seconds that it waits for the lighthouse to confirm its goodbye."""

_request_of = copier(QuorumRequest, RankAsk, "request", "info", "durable_relays")
_make_info = maker(MemberInfo)


class GroupServer:
    """Rank 0's side of a group, and its own link (``RankLink``).

    Args:
        settings: who the group is and where it listens.
        session: with the lighthouse, under the group's replica_id. Ranks and peers use the same token.
        on_failed: called once, on the loop, when the group is lost as a whole.
        on_push: called with what the lighthouse pushes, for this rank; the other ranks get it over their connections.
        activity: of the training thread; None: this thread.
    """

    def __init__(
        self,
        settings: GroupSettings,
        session: SessionSettings,
        on_failed: Callable[[str], None],
        on_push: Callable[[Push], None],
        activity: Activity | None = None,
    ) -> None:
        self.replica_id = session.replica_id
        self.activity = activity or Activity()
        self.address = ""
        self._leaving = self._refused = False
        self.layout_lines: list[str] = []
        """Rank 0's parameters, for a peer that looks for a difference."""
        self.layout_changed = False
        self.step_values = StepValues()
        self.joins = ""
        self.key_values: KeyValueServer | None = (served := KeyValueServer())
        self._served = served
        self._settings = settings
        self._job = session.job
        self._job_settings = ""
        """Of the last request."""
        self._tasks = OwnedTasks(self.on_broken)
        self._asks = GatheredAsks(settings, self._request_of_ranks, self._tasks.start)
        self._votes = GatheredVotes(settings.world_size)
        self._connections = RankConnections(self, settings, self._asks, self._votes, self._tasks)
        self._session = LighthouseSession(session, self._on_lighthouse_push, self._connections.timing_changed)
        self._on_failed = on_failed
        self._on_push = on_push
        self._info = MemberInfo()
        self._checkpoints: dict[int, str] = {}
        self._attempt = 0
        self._plan: QuorumPlan | None = None
        """Of the last quorum."""
        self._heals: dict[int, Healing] = {}
        """The last report of each rank on its heal, since the last request."""
        self._shards: dict[int, ShardReport] = {}
        """The last report of each rank on its shard."""
        self._failed = ""
        self._stored_at: tuple[str, ...] = ()
        """Relays with the newest durable checkpoint."""
        self._requesting = False
        self._left_early = ""
        """Why the group left in the middle of a request."""
        self._slow_quorum_log = SlowQuorumLog(self._session, session.replica_id, self._tasks.start)
        routes = [
            web.get("/healthz", self._healthz),
            web.get("/v1/ranks", self._connections.serve),
            web.get("/v1/ranks/{rank}/checkpoint", self._serve_checkpoint),
            web.get("/v1/layout", self._serve_layout),
            *served.routes(),
        ]
        self._listener = GroupListener(settings.host, settings.port, ClientToken.of(session.token), routes)

    # ---- life

    async def start(self, connect: bool = True) -> None:
        """Listen, then open the lighthouse session. OSError when the port is in use."""
        try:
            self.address = await self._listener.start()
            if connect:
                await self._session.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Say goodbye to the ranks, unless the group is lost, and stop listening.

        The lighthouse session ends without a goodbye, unless ``leave`` came before.
        """
        self._leaving = True
        self._listener.stop_listening()  # before the session ends: a lighthouse then looks whether the port is closed
        await self._tasks.close()
        await self._connections.close(goodbye=not self._failed)
        self._asks.deny("closed", "the group server was shut down")
        self._served.close()
        await self._session.close()
        await self._listener.close()

    def on_broken(self, error: BaseException) -> None:
        """See ``RankHost``."""
        log.error("group server failed", replica_id=self.replica_id, exc_info=error)
        self._tasks.start(self.fail(f"the group server failed: {error!r}"))

    # ---- the link of rank 0 itself (RankLink)

    @property
    def services(self) -> tuple[ServiceAddress, ...]:
        """See ``RankLink``."""
        return self._session.services

    @property
    def leaving(self) -> bool:
        """See ``RankHost``."""
        return self._leaving or self._refused

    @property
    def live_step(self) -> int:
        """See ``RankLink``."""
        return self._session.live_step

    @property
    def durable_relays(self) -> tuple[str, ...]:
        """See ``RankLink``."""
        return self._session.durable_relays

    def stored_at(self, relays: tuple[str, ...]) -> None:
        """See ``RankLink``."""
        self._stored_at = relays

    @property
    def heartbeat_timeout(self) -> float:
        """Of the job's policy, in seconds."""
        return self._session.liveness.timeout

    async def ask(self, ask: RankAsk) -> QuorumPlan:
        """See ``RankLink``."""
        before = self._attempt
        try:
            return await self.ask_of(0, ask)
        except asyncio.CancelledError:
            self._asks.withdraw(0, ask.request)
            if self._attempt > before:
                self._session.give_up_answer()
            raise

    async def vote(self, vote: RankVote, timeout: float) -> bool:
        """See ``RankLink``."""
        future = self._votes.cast(0, vote)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            missing = self._votes.missing()
            raise TimeoutError(f"timed out after {timeout:g} s: ranks {missing} of this group did not vote") from None

    def finished_step(self) -> None:
        """See ``RankLink``."""
        self._session.finished_step()

    def healing(self, progress: Healing) -> None:
        """See ``RankLink``."""
        self.healing_of(0, progress)

    def healing_of(self, rank: int, progress: Healing) -> None:
        """Report the heals of all ranks to the lighthouse, as one."""
        self._heals[rank] = progress
        self._session.healing(merge_healing(self._heals, self._settings.world_size))

    def shards(self, report: ShardReport) -> None:
        """See ``RankLink``."""
        self.shards_of(0, report)

    def shards_of(self, rank: int, report: ShardReport) -> None:
        """Report the shards of all ranks to the lighthouse, as one."""
        self._shards[rank] = report
        if (merged := merge_shards(self._shards, self._settings.world_size)) is not None:
            self._session.shards(merged)

    def stacks(self, found: RankStacks) -> None:
        """See ``RankLink``."""
        self._session.stacks(found)

    def request_leave(self, reason: str) -> None:
        """See ``RankLink``."""
        patience = 0.0 if self._session.stands_by else LEAVE_PATIENCE  # a spare is not waited for
        asyncio.get_running_loop().call_later(patience, self._leave_open_request, reason)

    def _leave_open_request(self, reason: str) -> None:
        """Leave in the middle of a request: the groups that would complete the quorum may have left already."""
        if self._requesting and not self._left_early:
            self._left_early = reason
            self._tasks.start(self._leave_or_close(reason, LEAVE_SECONDS))

    async def _leave_or_close(self, reason: str, timeout: float) -> None:
        try:
            await self.leave(reason, timeout, cause=leave_cause(reason))
        except (TimeoutError, KeepstepError, OSError) as error:
            log.warning("graceful leave failed; closing the session", error=str(error))
            await self._session.close()

    async def leave(self, reason: str, timeout: float, *, cause: str = "", step: int | None = None) -> None:
        """See ``RankLink``."""
        self._leaving = True
        await self._session.leave(reason, timeout, cause=cause, step=step)

    async def fail(self, reason: str) -> None:
        """Report to the lighthouse and to every rank that the group is lost, then call ``on_failed``."""
        if self._failed or self.leaving:
            return
        self._failed = reason
        log.error("group lost", replica_id=self.replica_id, reason=reason)
        self._connections.send(Failed(reason))
        try:
            await self._session.failed(reason, 0.3)
        except (TimeoutError, KeepstepError, OSError) as error:
            log.warning("failure not reported to the lighthouse", error=str(error))
        self._on_failed(reason)

    # ---- requests

    async def ask_of(self, rank: int, ask: RankAsk) -> QuorumPlan:
        """Take the request of ``rank``; return the group's plan once all ranks have asked."""
        self._checkpoints[rank] = ask.checkpoint
        if self._settings.world_size == 1:
            return await self._request({0: ask})
        return await self._asks.ask(rank, ask)

    async def _request_of_ranks(self, asks: dict[int, RankAsk]) -> QuorumPlan:
        self._refused = False
        try:
            return await self._request(asks)
        except (LayoutMismatch, ReplicasDiverged, StartRefused, Banned):
            self._refused = True  # the ranks end one after the other, and none has failed; or all of them ask again
            raise

    async def _request(self, asks: dict[int, RankAsk]) -> QuorumPlan:
        merged = self._merge(asks)
        if merged.leaving:
            await self._leave_or_close(merged.leaving, min(merged.timeout_ms / 1000, LEAVE_SECONDS))
            raise Leaving(merged.leaving)
        self._attempt += 1
        self._heals = {}
        self._job_settings = merged.settings
        info = _make_info(
            address=self.address,
            store_address=self._settings.store_address or self.address,
            world_size=self._settings.world_size,
            layout=merged.layout,
            rendezvous=RENDEZVOUS_VERSION,
            product=self._settings.product,
            joins=self.joins,
        )
        if info != self._info:  # an unchanged one stays the same object, which the session does not compare
            self._info = info
        quorum = await self._request_quorum(merged)
        plan = make_plan(
            quorum,
            self.replica_id,
            self._plan,
            attempt=self._attempt,
            heal_timeout_ms=self._session.heal_timeout_ms,
            brings_late=merged.min_groups > 0 and not quorum.finishing,
        )
        last, self._plan = self._plan, plan
        if last is None or (last.epoch, last.quorum_id) != (plan.epoch, plan.quorum_id):
            self._served.drop_before(self._job, plan.epoch, plan.quorum_id)
        return plan

    async def _request_quorum(self, ask: RankAsk) -> Quorum:
        """Ask the lighthouse; after a timeout ask again, up to ``quorum_retries`` times."""
        request = _request_of(ask, request=0, info=self._info, durable_relays=self._stored_at)
        retries_left = self._settings.quorum_retries
        while True:
            self._requesting = True
            try:
                with self._slow_quorum_log.waiting():
                    return await self._session.quorum(request)
            except TimeoutError as error:
                if not retries_left:
                    raise
                log.warning("no quorum; asking again", retries_left=retries_left, reason=str(error))
                retries_left -= 1
            except SessionClosed as error:
                if self._left_early:
                    raise Leaving(self._left_early) from error
                raise
            finally:
                self._requesting = False

    def _merge(self, asks: dict[int, RankAsk]) -> RankAsk:
        """Merge the requests. After a quorum that told this group to heal, the states of its ranks may differ."""
        try:
            return merge_asks(asks, self.replica_id)
        except DisagreeError:
            if self._plan is None or not self._plan.heal:
                raise
            return merge_asks(asks, self.replica_id, healed=True)

    # ---- pushes

    def _on_lighthouse_push(self, push: Push) -> None:
        if isinstance(push, Evicted | Hung):
            self._leaving = True  # the ranks end one after the other, and none has failed
        self._on_push(push)
        if not isinstance(push, (Connected, Disconnected)):
            self._connections.send(push)

    # ---- requests of other groups

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "replica_id": self.replica_id})

    async def _serve_checkpoint(self, request: web.Request) -> web.Response:
        try:
            metadata = self._checkpoints[int(request.match_info["rank"])]
        except (KeyError, ValueError):
            rank = request.match_info["rank"]
            return Problem(HTTPStatus.NOT_FOUND, f"no rank {rank} has asked for a quorum here").response()
        return web.json_response({"metadata": metadata})

    async def _serve_layout(self, request: web.Request) -> web.Response:
        lines, values, rank = self.layout_lines, self.step_values.lines(), request.query.get("rank", "0")
        if rank != "0":
            found = await self._connections.compared_of(int(rank)) if rank.isdecimal() and len(rank) < 10 else None
            if found is None:
                return Problem(HTTPStatus.NOT_FOUND, f"rank {rank} of {self.replica_id} does not answer").response()
            lines, values = [*found.lines], {}
            for step, name, text in (one.split("\t", 2) for one in found.values if one.count("\t") > 1):
                values.setdefault(step, {})[name] = text
        if request.query.get("part") == "values":
            lines = []
        facts = {"replica_id": self.replica_id, "settings": self._job_settings}
        return web.json_response({**facts, "lines": lines, "values": values, "changed": self.layout_changed})
