"""Connect the ranks of a group: rank 0 serves, and the others find it through the launcher's store."""

from __future__ import annotations

import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
from torch.distributed import Store

from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_client import RankClient
from keepstep.group.ranks.rank_link import GroupSettings, RankLink
from keepstep.preflight.preflight import check_machine
from keepstep.rendezvous.launcher_store import LauncherStore
from keepstep.runtime import environment
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.runtime.processor import processor
from keepstep.session.session_events import Push
from keepstep.session.session_settings import SessionSettings
from keepstep.stacks.activity import Activity
from keepstep.stacks.rank_stacks import StackReporter
from keepstep_mesh.checks.preflight_settings import PreflightSettings
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import split_addresses
from keepstep_mesh.errors import Banned
from keepstep_mesh.net.addresses import address_towards_any
from keepstep_mesh.protocol.names import group_name_problem
from keepstep_mesh.security.tokens import ClientToken

log = get_logger("keepstep.group")


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """This rank, its group, and the lighthouse, as arguments and environment give them."""

    session: SessionSettings
    """Of rank 0 with the lighthouse. Rank 0 fills in the replica_id."""
    name: str
    """Stable name of the group; empty: rank 0 makes one up."""
    rank: int
    world_size: int
    host: str
    port: int
    store_addr: str | None
    store_port: int | None
    restart: int
    quorum_retries: int
    spares: int = 0
    """Number of groups of the job that stand by."""
    notice: float = 0.0
    """Seconds from SIGTERM in which a spare may replace the group; 0: it leaves at once."""
    preflight: PreflightSettings | None = None
    """Checks of this machine before the group joins; None: no checks."""

    @property
    def stands_by(self) -> bool:
        """Whether the group waits as a spare while the job has enough groups without it."""
        return self.session.about.standby

    @property
    def job(self) -> str:
        return self.session.job

    @property
    def token(self) -> str | ClientToken | None:
        return self.session.token

    @classmethod
    def from_arguments(
        cls,
        *,
        lighthouse_addr: str | None,
        replica_id: str | None,
        rank: int,
        world_size: int,
        store_addr: str | None,
        store_port: int | None,
        port: int | None,
        hostname: str | None,
        heartbeat_interval: float,
        connect_timeout: float,
        quorum_retries: int,
        preflight: Sequence[str] | None = None,
    ) -> LinkSettings:
        """Complete the arguments from the environment. ValueError names what is missing or out of range."""
        addresses = lighthouse_addr or environment.variable("LIGHTHOUSE")
        if not addresses:
            raise ValueError(
                "no lighthouse address: pass lighthouse_addr or set KEEPSTEP_LIGHTHOUSE=http://host:29510 "
                "(`keepstep run` does; `keepstep up` starts one)"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be in [0, world_size={world_size})")
        port = port or environment.integer("MANAGER_PORT", 0)
        if not 0 <= port <= 65535:
            raise ValueError(f"port={port} (KEEPSTEP_MANAGER_PORT) must be in [0, 65535]; 0 takes any free port")
        lighthouses = split_addresses(addresses)
        name = replica_id or _name_of_group()
        if name and (problem := group_name_problem(name)) is not None:
            raise ValueError(f"{problem} (replica_id, REPLICA_GROUP_ID)")
        if world_size > 1:
            store_port = environment.from_launcher("MASTER_PORT", store_port, 0)
            store_addr = store_addr or os.environ.get("MASTER_ADDR")
        if world_size > 1 and not (store_addr and store_port):
            raise ValueError(
                f"a group of {world_size} ranks needs a store where they find each other: set MASTER_ADDR and "
                f"MASTER_PORT (torchrun and `keepstep run` do), or pass store_addr and store_port"
            )
        spares = environment.integer("SPARES", 0)
        notice = environment.variable("NOTICE_SEC")
        settings = cls(
            session=SessionSettings.from_environment(
                lighthouses,
                "",
                connect_timeout=connect_timeout,
                heartbeat_interval=heartbeat_interval,
                runtime=f"python {platform.python_version()}, torch {torch.__version__} on {processor()}",
                spares=spares,
            ),
            name=name,
            rank=rank,
            world_size=world_size,
            host=hostname or address_towards_any(lighthouses),
            port=port,
            store_addr=store_addr,
            store_port=store_port,
            restart=environment.restart_count(),
            quorum_retries=quorum_retries,
            spares=spares,
            notice=environment.seconds("NOTICE_SEC", timedelta(0)).total_seconds() if notice else 0.0,
            preflight=PreflightSettings.parsed(
                (environment.variable("PREFLIGHT") or "").splitlines() or preflight or ()
            ),
        )
        if spares and not settings.session.about.groups:
            raise ValueError(
                f"KEEPSTEP_SPARES={spares} must be less than NUM_REPLICA_GROUPS, the number of groups with the spares, "
                f"which is {os.environ.get('NUM_REPLICA_GROUPS', '')!r}"
            )
        return settings


def _name_of_group() -> str:
    """Return REPLICA_GROUP_ID, with an ``r`` before a plain number, as `keepstep run` names the group."""
    number = os.environ.get("REPLICA_GROUP_ID", "")
    return f"r{number}" if number.isdecimal() else number


def connect_group(
    loop_thread: LoopThread, settings: LinkSettings, on_failed: Callable[[str], None], on_push: Callable[[Push], None]
) -> tuple[RankLink, Store | None]:
    """On rank 0, start the group server and its lighthouse session; on other ranks, connect to the server.

    Returns:
        The link, and the launcher's store (None in a group of one rank). Keep the store: its server ends with it.

    Raises:
        TimeoutError: this took longer than ``connect_timeout``, without the checks before.
        PreflightExit: this machine failed a check.
        Banned: the lighthouse refuses the group; on every rank.
        KeepstepError: see ``LauncherStore`` and ``GroupServer``.
    """
    product = ""
    if settings.preflight is not None:
        product = check_machine(settings.preflight, settings.session, settings.name, loop_thread)
    deadline = time.monotonic() + settings.session.connect_timeout
    activity = Activity()
    reporter = StackReporter(settings.rank, activity)

    def pushed(push: Push) -> None:
        if not reporter.on_push(push):
            on_push(push)

    store = _launcher_store(settings, deadline) if settings.world_size > 1 else None
    if settings.rank == 0:
        name = settings.name or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        replica_id = f"{name}:{uuid.uuid4()}"
        limit = _left(deadline)
        _write_name_for_launcher(replica_id)
        server = GroupServer(
            GroupSettings(
                world_size=settings.world_size,
                host=settings.host,
                port=settings.port,
                restart=settings.restart,
                quorum_retries=settings.quorum_retries,
                product=product,
            ),
            replace(settings.session, replica_id=replica_id, connect_timeout=limit),
            on_failed,
            pushed,
            activity,
        )
        loop_thread.loop.call_soon_threadsafe(reporter.start, server.stacks)
        try:
            loop_thread.call(server.start(), limit + CALL_MARGIN_SECONDS)
        except Banned as error:
            if store is not None:
                store.announce_ban(str(error), settings.world_size - 1)
            raise
        if store is None:
            return server, None
        try:
            store.announce_rank_0(server.address, server.replica_id)
        except BaseException:
            loop_thread.call(server.close(), CALL_MARGIN_SECONDS)
            raise
        return server, store.store
    assert store is not None
    client = RankClient(
        store.address_of_rank_0(settings.name),
        settings.rank,
        settings.world_size,
        settings.restart,
        settings.token,
        on_failed,
        pushed,
        activity,
        settings.quorum_retries,
    )
    loop_thread.loop.call_soon_threadsafe(reporter.start, client.stacks)
    limit = _left(deadline)
    loop_thread.call(client.start(limit), limit + CALL_MARGIN_SECONDS)
    return client, store.store


def _launcher_store(settings: LinkSettings, deadline: float) -> LauncherStore:
    return LauncherStore(
        cast("str", settings.store_addr),
        cast("int", settings.store_port),
        rank=settings.rank,
        restart=settings.restart,
        agent_serves=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        deadline=deadline,
    )


def _write_name_for_launcher(replica_id: str) -> None:
    """Write the incarnation to the launcher's file. The launcher asks for its bans, and reports its end."""
    if file := os.environ.get("KEEPSTEP_NAME_FILE"):
        try:
            Path(file).write_text(replica_id)
        except OSError as error:
            log.warning("name of the group not written for the launcher", file=file, reason=error.strerror)


def _left(deadline: float) -> float:
    """Return the seconds left; never 0, which torch treats as no limit."""
    return max(deadline - time.monotonic(), 0.001)
