"""The launcher's TCPStore, through which the ranks of one group find their rank 0.

The process that starts the ranks may serve the store: torchrun's agent, another launcher, or a test in the same
process. Otherwise rank 0 serves it, as in ``init_process_group``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from keepstep_mesh.errors import Banned, KeepstepError
from keepstep_mesh.net.addresses import Lookup
from keepstep_mesh.net.fork_safety import claim_opened, open_socket, sockets_at
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.threads.starting import Thread

R = TypeVar("R")

SERVED_BY = "keepstep/served_by"
"""Key that marks a store served by a rank 0; no other rank 0 may use that store."""
BANNED = "banned"
"""Stands for the address of rank 0 in the entry of a group that the lighthouse refuses."""
BAN_NOTICE_SECONDS = 10.0
"""Limit for the other ranks of a banned group to read that entry; they may start later than rank 0."""
STORE_PROBE_SECONDS = 2.0
"""Limit of a connection attempt that checks whether a server listens."""
STORE_CONNECT_RETRY_SECONDS = 0.05
"""Pause before the address of rank 0 is read again."""
GRACE_SECONDS = 1.0
"""Time of a call beyond the deadline, so that torch's own error comes first; also the time to end when it is cut."""


class LauncherStore:
    """Joins the store at ``host:port``; on rank 0, serves it if no other process does.

    Args:
        host, port: MASTER_ADDR and MASTER_PORT of the group.
        rank: rank of this process in its group.
        restart: the launcher's restart count. Each start of the group has its own entry in a store that outlives it.
        agent_serves: whether the launcher serves the store for certain; rank 0 waits for it then.
        deadline: limit of every wait, in monotonic time.

    Raises:
        TimeoutError: the store was not reachable before ``deadline``.
        KeepstepError: this process cannot serve the store, or rank 0 of another group serves it.
    """

    def __init__(self, host: str, port: int, *, rank: int, restart: int, agent_serves: bool, deadline: float) -> None:
        self._host = host
        self._port = port
        self._place = f"MASTER_ADDR:MASTER_PORT ({host}:{port})"
        self._rank = rank
        self._deadline = deadline
        # without the group's name, which only rank 0 may know; a store belongs to one group
        self._key = f"keepstep/{restart}/group_server"
        may_serve = rank == 0 and not agent_serves
        self._foreign = {inode for _, inode in sockets_at(port)}
        """Sockets at this port that existed before."""
        with claim_opened(partial(sockets_at, port)):
            self.store = self._call(self._open if may_serve else self._join)
        """If this process serves the store, the server ends with the last reference."""

    def announce_rank_0(self, address: str, replica_id: str) -> None:
        """Store the address of this group's server for the other ranks.

        Raises:
            KeepstepError: rank 0 of another group uses this store.
            TimeoutError: the store did not answer before the deadline.
        """
        entry = f"{address} {replica_id}"
        known = ""
        while (found := self._call(partial(self._replace, known, entry))) != entry:
            other_address, _, other = found.partition(" ")
            # this process itself listens at its own address
            if other_address != address and self._listens_at(other_address):
                raise KeepstepError(
                    f"rank 0 of {other} already uses the store of {replica_id} at {self._place}: give every group its "
                    f"own MASTER_ADDR and MASTER_PORT"
                )
            known = found  # written by this group before a restart

    def announce_ban(self, reason: str, others: int) -> None:
        """Store that the lighthouse refuses this group, until the other ranks have read it.

        Args:
            reason: of the lighthouse.
            others: number of other ranks. The wait for them has a limit: some may have failed.
        """
        seen = f"{self._key}/ban_seen"

        def announce() -> None:
            self.store.delete_key(seen)
            self.store.set(self._key, f"{BANNED} {reason}")
            deadline = time.monotonic() + min(BAN_NOTICE_SECONDS, self._left())
            while self.store.add(seen, 0) < others and time.monotonic() < deadline:
                time.sleep(STORE_CONNECT_RETRY_SECONDS)  # the store cannot wait for a counter to reach a value
            self.store.delete_key(self._key)  # a later start of the group may be welcome

        with contextlib.suppress(TimeoutError):  # the other ranks then end when they find no rank 0
            self._call(announce)

    def address_of_rank_0(self, name: str) -> str:
        """Wait for the address of the group's server. An entry from before a restart is ignored.

        Args:
            name: stable name of the group; empty: accept any.

        Raises:
            Banned: rank 0 announced that the lighthouse refuses the group.
            KeepstepError: rank 0 belongs to a group of another name.
            TimeoutError: rank 0 did not announce itself, or was not reachable, before the deadline.
        """
        stale = ""
        while True:
            try:
                address, _, replica_id = self._call(self._read).partition(" ")
            except TimeoutError as error:
                raise TimeoutError(
                    f"rank {self._rank} found no address of rank 0 of its group in the store at {self._place}: look at "
                    f"the output of rank 0, it may not have started or not reached the lighthouse: {error}"
                ) from error
            if address == BANNED:
                self._call(lambda: self.store.add(f"{self._key}/ban_seen", 1))
                raise Banned(replica_id)
            if self._listens_at(address):
                break
            stale = f"rank 0 of {replica_id} does not listen at {address}, its address in the store at {self._place}"
            if self._left() <= STORE_CONNECT_RETRY_SECONDS:
                raise TimeoutError(f"rank {self._rank} could not reach rank 0 of its group: {stale}")
            time.sleep(STORE_CONNECT_RETRY_SECONDS)  # the store cannot wait for another value of a key
        if name and name_of(replica_id) != name:
            raise KeepstepError(
                f"rank {self._rank} of {name} found rank 0 of {replica_id} in the store at {self._place}: give every "
                f"group its own MASTER_ADDR and MASTER_PORT, and the same name to all its ranks or only to rank 0"
            )
        return address

    def _open(self) -> TCPStore:
        if not listens(self._host, self._port, min(STORE_PROBE_SECONDS, self._left())):
            try:
                store = self._tcp_store(is_master=True)
            except RuntimeError as error:
                if not listens(self._host, self._port, min(STORE_PROBE_SECONDS, self._left())):
                    raise KeepstepError(
                        f"rank 0 cannot serve the store of its group at {self._place}: {error}"
                    ) from error
                # another process started to serve the store after the probe
            else:
                store.set(SERVED_BY, f"{socket.gethostname()}, process {os.getpid()}")
                return store
        store = self._join()
        if store.check([SERVED_BY]):
            raise KeepstepError(
                f"the store at {self._place} is served by rank 0 of another group, or by that of this group before a "
                f"restart ({store.get(SERVED_BY).decode()}): give every group its own MASTER_ADDR and MASTER_PORT"
            )
        return store

    def _join(self) -> TCPStore:
        return self._tcp_store(is_master=False)

    def _tcp_store(self, *, is_master: bool) -> TCPStore:
        return TCPStore(
            host_name=self._host,
            port=self._port,
            world_size=None,
            is_master=is_master,
            timeout=timedelta(seconds=self._left()),
            wait_for_workers=False,
            multi_tenant=True,  # the script's init_process_group may open it again
        )

    def _replace(self, expected: str, entry: str) -> str:
        return self.store.compare_set(self._key, expected, entry).decode()

    def _read(self) -> str:
        self.store.wait([self._key], timedelta(seconds=self._left()))
        return self.store.get(self._key).decode()

    def _listens_at(self, address: str) -> bool:
        parts = urlsplit(address)
        return listens(parts.hostname or "", parts.port or 0, min(STORE_PROBE_SECONDS, self._left()))

    def _left(self) -> float:
        """Return the seconds left; never 0, which torch treats as no limit."""
        return max(self._deadline - time.monotonic(), 0.001)

    def _call(self, work: Callable[[], R]) -> R:
        """Run ``work`` with the deadline.

        torch waits without limit for the answer of a server that is frozen, or is not a store. At the deadline the
        connections to it are closed, which ends ``work``.
        """
        done: concurrent.futures.Future[R] = concurrent.futures.Future()
        thread = Thread(target=_complete, args=(done, work), name="keepstep-launcher-store", daemon=True)
        thread.start()
        try:
            return done.result(self._left() + GRACE_SECONDS)
        except concurrent.futures.TimeoutError:
            self._close_connections()
            reason = "the server does not answer, or is not a TCPStore"
        except KeepstepError:
            raise
        except (RuntimeError, OSError) as error:
            reason = str(error)
        finally:
            thread.join(GRACE_SECONDS)
        raise TimeoutError(f"rank {self._rank} could not use the store of its group at {self._place}: {reason}")

    def _close_connections(self) -> None:
        for descriptor, inode in sockets_at(self._port):
            if inode not in self._foreign:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _complete(done: concurrent.futures.Future[R], work: Callable[[], R]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  # the caller raises it
        done.set_exception(error)


def listens(host: str, port: int, timeout: float) -> bool:
    """Return whether a server accepts a connection at ``host:port`` within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    with contextlib.suppress(OSError, ValueError):
        for family, kind, protocol, _, address in Lookup(host, port).result(timeout):
            with contextlib.suppress(OSError), open_socket(family, kind, protocol) as probe:
                probe.settimeout(max(deadline - time.monotonic(), 0.001))
                probe.connect(address)
                return True
    return False
