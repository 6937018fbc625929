"""Who this group is, and how its ranks come together: rank 0 serves, the others find it through the launcher's
store.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

from torch.distributed import Store, TCPStore

from keepstep import environment
from keepstep.group import GroupSettings, RankLink
from keepstep.group_server import GroupServer
from keepstep.mesh_thread import SLACK, MeshThread
from keepstep.rank_client import RankClient
from keepstep_mesh.auth import ClientToken
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.logging import get_logger
from keepstep_mesh.session import LighthouseSession, Push, SessionSettings
from keepstep_mesh.settings import split_addresses
from keepstep_mesh.tls import TlsFiles, tls_of_client

log = get_logger("keepstep.group")


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Everything that arguments and environment say about this rank's place."""

    lighthouses: tuple[str, ...]
    job: str
    name: str
    """The group's stable name."""
    rank: int
    world_size: int
    host: str
    port: int
    store_addr: str | None
    store_port: int | None
    restart: int
    token: ClientToken
    tls: TlsFiles
    heartbeat_interval: float
    connect_timeout: float
    quorum_retries: int

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
    ) -> LinkSettings:
        """Arguments, completed from the environment. ValueError that says what to set."""
        addresses = lighthouse_addr or environment.variable("LIGHTHOUSE")
        if not addresses:
            raise ValueError(
                "no lighthouse given: pass lighthouse_addr or set KEEPSTEP_LIGHTHOUSE=http://host:29510 "
                "(`keepstep run` does; `keepstep up` starts one)"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be in [0, world_size={world_size})")
        lighthouses = split_addresses(addresses)
        store_port = store_port or int(os.environ.get("MASTER_PORT") or 0) or None
        store_addr = store_addr or os.environ.get("MASTER_ADDR") or None
        if world_size > 1 and not (store_addr and store_port):
            raise ValueError(
                f"a group of {world_size} ranks needs a place where they find each other: set MASTER_ADDR and "
                f"MASTER_PORT (torchrun and `keepstep run` do), or pass store_addr and store_port"
            )
        return cls(
            lighthouses=lighthouses,
            job=environment.variable("JOB") or "default",
            name=replica_id or _name_of_group() or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
            rank=rank,
            world_size=world_size,
            host=hostname or environment.address_towards(lighthouses[0]),
            port=port or environment.integer("MANAGER_PORT", 0),
            store_addr=store_addr,
            store_port=store_port,
            restart=environment.restart_count(),
            token=ClientToken(),
            tls=tls_of_client(),
            heartbeat_interval=heartbeat_interval,
            connect_timeout=connect_timeout,
            quorum_retries=quorum_retries,
        )


def _name_of_group() -> str:
    """REPLICA_GROUP_ID, with an ``r`` before a bare number: the name that `keepstep run` prints before its lines."""
    number = os.environ.get("REPLICA_GROUP_ID", "")
    return f"r{number}" if number.isdecimal() else number


def connect_group(
    mesh: MeshThread, settings: LinkSettings, on_failed: Callable[[str], None], on_push: Callable[[Push], None]
) -> tuple[RankLink, Store | None]:
    """Rank 0: starts the group server and its lighthouse session. Others: connect to it. Both within
    connect_timeout.
    """
    store = _meeting_store(settings) if settings.world_size > 1 else None
    key = f"keepstep/{settings.name}/{settings.restart}/group_server"
    limit = settings.connect_timeout
    if settings.rank == 0:
        _tell_launcher(settings.name)
        server = GroupServer(
            GroupSettings(
                replica_id=f"{settings.name}:{uuid.uuid4()}",
                world_size=settings.world_size,
                host=settings.host,
                port=settings.port,
                restart=settings.restart,
                token=settings.token,
                quorum_retries=settings.quorum_retries,
            ),
            lambda replica_id, push: LighthouseSession(
                SessionSettings(
                    addresses=settings.lighthouses,
                    job=settings.job,
                    replica_id=replica_id,
                    token=settings.token,
                    tls=settings.tls,
                    connect_timeout=limit,
                    heartbeat_interval=settings.heartbeat_interval,
                ),
                push,
            ),
            on_failed,
            on_push,
        )
        mesh.call(server.start(), limit + SLACK)
        if store is not None:
            store.set(key, server.address)
        return server, store
    assert store is not None
    client = RankClient(
        store.get(key).decode(),
        settings.rank,
        settings.world_size,
        settings.restart,
        settings.token,
        on_failed,
        on_push,
        settings.quorum_retries,
    )
    mesh.call(client.start(limit), limit + SLACK)
    return client, store


def _tell_launcher(name: str) -> None:
    """Leaves the group's name where the launcher looks for it: it asks under this name whether the group is banned."""
    if file := os.environ.get("KEEPSTEP_NAME_FILE"):
        try:
            Path(file).write_text(name)
        except OSError as error:
            log.warning("the launcher is not told this group's name", file=file, reason=error.strerror)


def _meeting_store(settings: LinkSettings) -> Store:
    """The launcher's TCPStore. torchrun's agent serves it; without an agent rank 0 does, as ``init_process_group``
    would.
    """
    serves = settings.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        return TCPStore(
            host_name=cast("str", settings.store_addr),
            port=cast("int", settings.store_port),
            world_size=None,
            is_master=serves,
            timeout=timedelta(seconds=settings.connect_timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, OSError) as error:
        raise KeepstepError(
            f"rank {settings.rank} could not reach the store of its group at MASTER_ADDR:MASTER_PORT "
            f"({settings.store_addr}:{settings.store_port}): {error}"
        ) from error
