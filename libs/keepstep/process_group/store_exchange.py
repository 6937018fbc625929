"""Exchange of reconfigure handles through a store."""

from __future__ import annotations

import uuid as uuids
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

from keepstep.process_group.base import DEFAULT_TIMEOUT
from keepstep.process_group.reconfiguration import ReconfigureOptions
from keepstep_mesh.net.fork_safety import claim_opened, sockets_at

UUID_BITS = 63


class Reconfigurable(Protocol):
    """A process group that has torch's contract."""

    supports_reconfigure: bool

    def get_reconfigure_handle(self) -> str:
        """Return the name of this process group for its peers."""
        ...

    def reconfigure(self, opts: Any) -> Work:
        """Connect with the members of ``opts``, in place of the previous ones."""
        ...


def reconfigure_with_store(
    pg: Reconfigurable, store_addr: str, rank: int, world_size: int, timeout: timedelta = DEFAULT_TIMEOUT
) -> None:
    """Exchange reconfigure handles through a store, and reconfigure a process group. For use without a Manager.

    Args:
        pg: a process group of keepstep, or one of torch that was made with ``enable_reconfigure=True``.
        store_addr: ``host:port/prefix`` of a TCPStore; every call needs a new prefix.
        rank: rank of this process in the new membership.
        world_size: number of members.
        timeout: limit of the exchange, and again of the reconfiguration; default 60 s.

    Raises:
        ValueError: ``store_addr`` is invalid.
        TimeoutError, RuntimeError: a member is missing, or the reconfiguration failed.
    """
    reconfigure_over(pg, create_store_client(store_addr, timeout), rank, world_size, timeout)


def reconfigure_over(
    pg: Reconfigurable, store: Store, rank: int, world_size: int, timeout: timedelta, *, uuid: int | None = None
) -> None:
    """Exchange handles through ``store``, and reconfigure ``pg``.

    Args:
        pg: the process group.
        store: a store without keys of earlier calls.
        rank: rank of this process in the new membership.
        world_size: number of members.
        timeout: limit of the exchange, and of the reconfiguration.
        uuid: number of the membership; None: rank 0 chooses it.

    Raises:
        TimeoutError, RuntimeError: a member is missing, or the reconfiguration failed.
    """
    store.set(f"handle/{rank}", pg.get_reconfigure_handle())
    if uuid is None and rank == 0:
        store.set("uuid", str(uuids.uuid4().int >> (128 - UUID_BITS)))
    keys = [f"handle/{peer}" for peer in range(world_size)]
    store.wait([*keys, *(["uuid"] if uuid is None else [])], timeout)
    options = ReconfigureOptions()
    options.uuid = int(store.get("uuid")) if uuid is None else uuid
    options.handles = [bytes(store.get(key)).decode() for key in keys]
    options.timeout = timeout
    pg.reconfigure(options).wait()


def create_store_client(store_addr: str, timeout: timedelta) -> Store:
    """Connect to a TCPStore, for a process group of your own.

    Args:
        store_addr: ``host:port/prefix``; an IPv6 address with or without brackets.
        timeout: of the connection, and of each operation of the store.

    Returns:
        A PrefixStore with ``prefix``.

    Raises:
        ValueError: ``store_addr`` is invalid.
        RuntimeError: no store answered in time.
    """
    endpoint, _, prefix = store_addr.partition("/")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"invalid store address {store_addr!r}: expected host:port/prefix")
    with claim_opened(partial(sockets_at, int(port))):
        tcp = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(prefix, tcp)
