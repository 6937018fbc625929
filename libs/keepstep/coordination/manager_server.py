"""The group server of a replica group in a thread, and a blocking client for each of its ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta

from keepstep.coordination.connections import Connections, leave
from keepstep.group.group_peers import checkpoint_metadata
from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_client import RankClient
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.runtime.environment import restart_count
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.config.settings import bind_address, split_addresses
from keepstep_mesh.net.addresses import address_towards_any
from keepstep_mesh.protocol.group_messages import RankAsk, RankVote
from keepstep_mesh.protocol.lineage import NEW
from keepstep_mesh.security.tokens import ClientToken


@dataclass(frozen=True, slots=True)
class QuorumResult:
    """The part of one rank in a quorum, as ``keepstep.group.quorum_plan`` computes it.

    Attributes:
        quorum_id: changes whenever the members change.
        replica_rank, replica_world_size: position of this replica group among the members, and their number.
        recover_src_manager_address: manager of the group to heal from; empty: this group does not heal.
        recover_src_replica_rank: rank of that group; None: this group does not heal.
        recover_dst_replica_ranks: ranks of the groups that heal from this one.
        store_address: store at which the members build their process group.
        max_step: step of the most advanced members.
        max_replica_rank: position among the members at ``max_step``; None: this group is behind.
        max_world_size: number of members at ``max_step``.
        heal: whether this group heals.
        replica_ids: all members, sorted.
    """

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


class ManagerServer:
    """The group server of one replica group, in a thread of its own.

    Args:
        replica_id: of the group; used as it is.
        lighthouse_addr: ``http://host:port`` of the lighthouse; several are separated by commas.
        hostname: advertised to other groups; empty: the address of the interface that reaches the lighthouse.
        bind: ``host:port``; only the port is used.
        store_addr: where the members build their process group if this group hosts it; empty: at this server.
        world_size: number of ranks of the group.
        heartbeat_interval, connect_timeout: of the session with the lighthouse.
        quorum_retries: how often a quorum request that timed out is repeated.

    Raises:
        ValueError: ``bind`` is not an address.
        TimeoutError: no lighthouse answered within ``connect_timeout``.
        OSError: the port is not available.
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
            lambda _: None,  # the server informs the ranks and logs the reason
            lambda _: None,
        )
        self._loop_thread = LoopThread("keepstep-manager-server")
        try:
            self._loop_thread.call(self._server.start(), connect_timeout.total_seconds() + CALL_MARGIN_SECONDS)
        except BaseException:
            self._loop_thread.stop()
            raise

    def address(self) -> str:
        """Return ``http://host:port``."""
        return self._server.address

    def shutdown(self) -> None:
        """Leave the job, then stop the server and its thread."""
        leave(self._loop_thread, self._server, "shutdown")
        self._loop_thread.stop()


class ManagerClient:
    """Connections of a group's ranks to their ``ManagerServer``.

    Args:
        addr: address of the server.
        connect_timeout: time limit of the connection that the first call of each rank opens.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._addr = addr
        self._connect_timeout = connect_timeout.total_seconds()
        self._loop_thread = LoopThread("keepstep-manager-client")
        self._clients = Connections(self._loop_thread, self._open_client)
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
        """Ask for the next quorum, and wait until every rank of the group has asked and the quorum has formed.

        Args:
            group_rank: rank within the group.
            step: current step.
            checkpoint_metadata: how peers fetch this rank's state.
            shrink_only: if true, the quorum takes only members of the previous one.
            timeout: time limit.
            commit_failures: number of steps in a row that failed to commit.
            init_sync: if true, all groups begin with the weights of one of them.
            lineage: which weights the group holds; None: derived from ``step`` and ``init_sync``.

        Raises:
            TimeoutError: no quorum within ``timeout``; the message has the reason.
            RuntimeError: any other failure.
        """
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
        plan = self._loop_thread.call(client.ask(ask), seconds + CALL_MARGIN_SECONDS)
        self._answers[group_rank] = (plan.epoch, plan.quorum_id, plan.attempt)
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
        """Vote, and return the group's decision once every rank has voted.

        Args:
            group_rank: rank within the group.
            step: the step to commit.
            should_commit: this rank's vote.
            timeout: time limit.

        Raises:
            TimeoutError: a rank has not voted within ``timeout``.
            RuntimeError: any other failure.
        """
        client = self._client(group_rank)
        epoch, quorum_id, attempt = self._answers.get(group_rank, (0, 0, 0))
        seconds = timeout.total_seconds()
        vote = RankVote(epoch, quorum_id, step, attempt, should_commit)
        return self._loop_thread.call(client.vote(vote, seconds), seconds + CALL_MARGIN_SECONDS)

    def checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """Return the ``checkpoint_metadata`` that a rank passed to its last ``quorum``.

        Args:
            rank: rank within the group.
            timeout: time limit.

        Raises:
            TimeoutError: no answer within ``timeout``.
        """
        return self._loop_thread.call(
            checkpoint_metadata(self._addr, rank, ClientToken(), timeout.total_seconds()),
            timeout.total_seconds() + 1,
        )

    def shutdown(self) -> None:
        """Close all connections and stop the thread."""
        self._clients.leave_all("shutdown")
        self._loop_thread.stop()
