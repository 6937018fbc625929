"""The quorum without a Manager, and without torch: a lighthouse in a thread, and blocking clients of it.

Names and parameters are torchft's. Deadlines give ``TimeoutError``, everything else ``RuntimeError`` with the reason. A
connection is retried with backoff within ``connect_timeout``.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from keepstep.group.group_peers import checkpoint_metadata
from keepstep.group.group_server import GroupServer
from keepstep.group.quorum_plan import make_plan
from keepstep.group.rank_client import RankClient
from keepstep.group.rank_link import GroupSettings
from keepstep.runtime.environment import restart_count
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import Settings, bind_address, split_addresses
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.addresses import address_towards_any
from keepstep_mesh.protocol.group_messages import RankAsk, RankVote
from keepstep_mesh.protocol.lineage import NEW
from keepstep_mesh.protocol.membership import Data, MemberInfo
from keepstep_mesh.protocol.membership import Quorum as MeshQuorum
from keepstep_mesh.security.tls import tls_of_service
from keepstep_mesh.security.tokens import ClientToken, Tokens, tokens_of_service
from keepstep_mesh.session.lighthouse_session import LighthouseSession
from keepstep_mesh.session.session_settings import SessionSettings

if TYPE_CHECKING:
    from keepstep_lighthouse.app import Lighthouse

log = get_logger("keepstep.coordination")

K = TypeVar("K", bound=Hashable)
C = TypeVar("C", LighthouseSession, RankClient)


@dataclass(frozen=True, slots=True)
class QuorumMember:
    """One participant. ``data`` is what it passed to ``LighthouseClient.quorum``."""

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: Data = None


@dataclass(frozen=True, slots=True)
class Quorum:
    """``created``: Unix time in seconds at which this quorum_id was formed."""

    quorum_id: int
    participants: list[QuorumMember]
    created: float


@dataclass(frozen=True, slots=True)
class QuorumResult:
    """One rank's part in a quorum, as ``keepstep.group.quorum_plan`` computes it."""

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    recover_src_manager_address: str
    recover_src_replica_rank: int | None
    recover_dst_replica_ranks: list[int]
    store_address: str
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    heal: bool
    replica_ids: list[str]


class LighthouseServer:
    """A lighthouse in a thread of its own, its state in memory.

    Args:
        bind: ``host:port``; port 0 takes a free one. ``[::]`` and ``0.0.0.0`` mean this machine only while no token is
            set (``KEEPSTEP_WORKER_TOKEN`` ...).
        min_replicas: fewer never make a quorum.
        join_timeout_ms: how long a quorum waits for healthy groups that have not asked; default 60 s.
        quorum_tick_ms: taken for compatibility; the lighthouse acts on events and has no tick.
        heartbeat_timeout_ms: silence after which a group is dead; default 5 s.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,  # noqa: ARG002
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        try:
            from keepstep_lighthouse.app import Lighthouse, LighthouseSettings  # noqa: PLC0415  a service, loaded lazily
            from keepstep_lighthouse.quorum.events import Policy  # noqa: PLC0415
            from keepstep_lighthouse.quorum.policies import policy_problem  # noqa: PLC0415
        except ImportError as error:
            raise RuntimeError(
                f"LighthouseServer needs pip install -e '.[services]' in keepstep's folder: {error}"
            ) from error
        policy = Policy(
            min_replicas=min_replicas,
            join_timeout=60.0 if join_timeout_ms is None else join_timeout_ms / 1000,
            heartbeat_timeout=5.0 if heartbeat_timeout_ms is None else heartbeat_timeout_ms / 1000,
        )
        if (problem := policy_problem(policy)) is not None:
            raise ValueError(problem)
        host, _, port = bind.removeprefix("http://").rpartition(":")
        tokens = tokens_of_service(os.environ, None)
        if host in ("[::]", "0.0.0.0", ""):  # noqa: S104  torchft's spelling of "everywhere"
            host = "127.0.0.1" if tokens == Tokens() else "0.0.0.0"  # noqa: S104
        self._mesh = LoopThread("keepstep-lighthouse")
        try:
            self._service: Lighthouse = Lighthouse(
                LighthouseSettings(
                    bind=f"{host}:{port}", policy=policy, tokens=tokens, tls=tls_of_service(Settings(), "lighthouse")
                )
            )
            self._mesh.call(self._service.start(), 30.0)
        except BaseException:
            self._mesh.stop()
            raise

    def address(self) -> str:
        """``http://host:port``; ``https`` with ``KEEPSTEP_LIGHTHOUSE_TLS_CERT``."""
        return self._service.address

    def shutdown(self) -> None:
        self._mesh.call(self._service.stop(), 30.0)
        self._mesh.stop()


class _Connections(Generic[K, C]):
    """One for each key, opened when it is first wanted; who waits for one holds up nobody who wants another.

    Args:
        open_one: gives the connection of a key, open.
    """

    def __init__(self, mesh: LoopThread, open_one: Callable[[K], Coroutine[Any, Any, C]]) -> None:
        self._mesh = mesh
        self._open_one: Callable[[K], Coroutine[Any, Any, C]] = open_one
        self._lock = threading.Lock()
        self._opened: dict[K, concurrent.futures.Future[C]] = {}

    def get(self, key: K, timeout: float) -> C:
        """Raises what ``open_one`` raises; the next call then opens it anew."""
        with self._lock:
            one = self._opened.get(key)
            if one is None or (one.done() and (one.cancelled() or one.exception() is not None)):
                one = self._opened[key] = self._mesh.spawn(self._open_one(key))
        return one.result(timeout)

    def leave_all(self, reason: str) -> None:
        with self._lock:
            opened, self._opened = self._opened, {}
        for one in opened.values():
            if not one.cancel() and one.exception() is None:
                _leave(self._mesh, one.result(), reason)


def _leave(mesh: LoopThread, one: LighthouseSession | GroupServer | RankClient, reason: str) -> None:
    """Ends ``one`` with a goodbye or, where nobody takes one, without."""
    try:
        mesh.call(one.leave(reason, 1.0), 1.0 + CALL_MARGIN_SECONDS)
    except (TimeoutError, KeepstepError, OSError) as error:
        log.info("left without goodbye", reason=f"{type(error).__name__}: {error}")
    mesh.call(one.close(), CALL_MARGIN_SECONDS)


class LighthouseClient:
    """Asks for quorums under any replica_id; each id has a session of its own.

    Args:
        addr: ``http://host:port``, several separated by commas.
        connect_timeout: of the first connection.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._addresses = split_addresses(addr)
        self._connect_timeout = connect_timeout.total_seconds()
        self._mesh = LoopThread("keepstep-lighthouse-client")
        self._sessions = _Connections(self._mesh, self._open_session)

    async def _open_session(self, replica_id: str) -> LighthouseSession:
        session = LighthouseSession(
            SessionSettings.from_environment(self._addresses, replica_id, connect_timeout=self._connect_timeout),
            lambda _: None,
        )
        await session.start()
        return session

    def _session(self, replica_id: str) -> LighthouseSession:
        return self._sessions.get(replica_id, self._connect_timeout + CALL_MARGIN_SECONDS)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: Data = None,
    ) -> Quorum:
        """Asks, waits, and answers with all participants. TimeoutError with the lighthouse's reason."""
        seconds = timeout.total_seconds()
        answer: MeshQuorum = self._mesh.call(
            self._session(replica_id).quorum(
                step=step or 0,
                lineage="",
                shrink_only=bool(shrink_only),
                commit_failures=0,
                info=MemberInfo(address or "", store_address or "", world_size or 0, "", data),
                timeout=seconds,
            ),
            seconds + CALL_MARGIN_SECONDS,
        )
        participants = [
            QuorumMember(
                m.replica_id,
                m.info.address,
                m.info.store_address,
                m.step,
                m.info.world_size,
                m.shrink_only,
                m.info.data,
            )
            for m in answer.members
        ]
        return Quorum(answer.quorum_id, participants, answer.created_ms / 1000)

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Makes ``replica_id`` known as alive; its session goes on beating from then on.

        TimeoutError when no lighthouse answers within ``timeout``, the first time after ``connect_timeout``.
        """
        seconds = timeout.total_seconds()
        self._mesh.call(self._session(replica_id).probe(seconds), seconds + CALL_MARGIN_SECONDS)

    def shutdown(self) -> None:
        """Ends all sessions; their groups have left."""
        self._sessions.leave_all("client shut down")
        self._mesh.stop()


class ManagerServer:
    """The group server of one replica group, in a thread of its own.

    Args:
        replica_id: of the group; used as it is.
        lighthouse_addr: ``http://host:port``, several separated by commas.
        hostname: to advertise; empty: the address of the interface that reaches the lighthouse.
        bind: ``host:port``; only the port counts.
        store_addr: what members are told to meet at; empty: this server.
        world_size: ranks of the group.
        heartbeat_interval, connect_timeout: of the lighthouse session.
        quorum_retries: how often a quorum that timed out is asked for again.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        addresses = split_addresses(lighthouse_addr)
        self._server = GroupServer(
            GroupSettings(
                world_size=world_size,
                host=hostname or address_towards_any(addresses),
                port=bind_address(bind)[1],
                restart=restart_count(),
                store_address=store_addr,
                quorum_retries=quorum_retries,
                rank_0_connects=True,
            ),
            SessionSettings.from_environment(
                addresses,
                replica_id,
                connect_timeout=connect_timeout.total_seconds(),
                heartbeat_interval=heartbeat_interval.total_seconds(),
            ),
            lambda _: None,  # the ranks are told, and the server says so in its log
            lambda _: None,
        )
        self._mesh = LoopThread("keepstep-manager-server")
        try:
            self._mesh.call(self._server.start(), connect_timeout.total_seconds() + CALL_MARGIN_SECONDS)
        except BaseException:
            self._mesh.stop()
            raise

    def address(self) -> str:
        """``http://host:port``."""
        return self._server.address

    def shutdown(self) -> None:
        _leave(self._mesh, self._server, "shutdown")
        self._mesh.stop()


class ManagerClient:
    """One rank's connections to its ``ManagerServer``.

    Args:
        addr: of the server.
        connect_timeout: of each rank's first call.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._addr = addr
        self._connect_timeout = connect_timeout.total_seconds()
        self._mesh = LoopThread("keepstep-manager-client")
        self._clients = _Connections(self._mesh, self._open_client)
        self._answers: dict[int, tuple[int, int, int]] = {}
        self._requests = itertools.count(1)

    async def _open_client(self, group_rank: int) -> RankClient:
        client = RankClient(self._addr, group_rank, 0, restart_count(), ClientToken(), lambda _: None, lambda _: None)
        await client.start(self._connect_timeout)
        return client

    def _client(self, group_rank: int) -> RankClient:
        return self._clients.get(group_rank, self._connect_timeout + CALL_MARGIN_SECONDS)

    def quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int = 0,
        init_sync: bool = True,
        lineage: int | str | None = None,
    ) -> QuorumResult:
        """This rank's part in the next quorum, once every rank of the group has asked."""
        client = self._client(group_rank)
        seconds = timeout.total_seconds()
        if lineage is None:
            lineage = f"{NEW}{client.replica_id}" if init_sync and step == 0 else ""
        ask = RankAsk(
            next(self._requests),
            step,
            lineage,
            shrink_only,
            commit_failures,
            round(seconds * 1000),
            checkpoint=checkpoint_metadata,
        )
        answer = self._mesh.call(client.ask(ask), seconds + CALL_MARGIN_SECONDS)
        plan = make_plan(answer.quorum, client.replica_id)
        self._answers[group_rank] = (plan.epoch, plan.quorum_id, answer.attempt)
        source = plan.members[plan.source].info.address if plan.source is not None else ""
        return QuorumResult(
            quorum_id=plan.quorum_id,
            replica_rank=plan.replica_rank,
            replica_world_size=plan.replica_world_size,
            recover_src_manager_address=source,
            recover_src_replica_rank=plan.source,
            recover_dst_replica_ranks=list(plan.destinations),
            store_address=plan.store_address,
            max_step=plan.max_step,
            max_replica_rank=plan.max_replica_rank,
            max_world_size=plan.max_world_size,
            heal=plan.heal,
            replica_ids=list(plan.replica_ids),
        )

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """The group's decision once every rank has voted under the quorum that it last got. TimeoutError else."""
        client = self._client(group_rank)
        epoch, quorum_id, attempt = self._answers.get(group_rank, (0, 0, 0))
        seconds = timeout.total_seconds()
        vote = RankVote(epoch, quorum_id, step, attempt, should_commit)
        return self._mesh.call(client.vote(vote, seconds), seconds + CALL_MARGIN_SECONDS)

    def checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """What rank ``rank`` of the server's group gave for its peers."""
        return self._mesh.call(
            checkpoint_metadata(self._addr, rank, ClientToken(), timeout.total_seconds()),
            timeout.total_seconds() + 1,
        )

    def shutdown(self) -> None:
        self._clients.leave_all("shutdown")
        self._mesh.stop()
