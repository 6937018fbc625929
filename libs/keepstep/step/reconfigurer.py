"""Rebuild the process group for each quorum, and abort it when a member is lost.

The process group is built once for each quorum_id, in a thread of its own because building blocks. After an abort it
cannot be used under that quorum_id (``broken``); the next request must get a new quorum_id.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.turns import out_of_turn
from keepstep.process_group import ProcessGroup
from keepstep.process_group.store_exchange import reconfigure_over
from keepstep.rendezvous.key_value_server import MAX_TOTAL_BYTES, VERSION, KeyValueServer, Table
from keepstep.rendezvous.store_client import RendezvousStore
from keepstep.runtime.devices import has_accelerator
from keepstep.runtime.late_threads import start_or_run
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import Thread

REMEMBERED = 64
"""Number of quorums whose loss is kept: the loss may arrive before the answer of its quorum is handled."""


class Reconfigurer:
    """Owns one process group over the replica groups.

    Args:
        pg: reconfigured, aborted and shut down here.
        job: name of the job.
        replica_id: of this group.
        group_rank: of this process within its group.
        group_world_size: number of ranks in the group.
        token: for the rendezvous of the members.
        host: address of this process, which the sockets of the process group bind to.
        key_values: the rendezvous table, if this process serves one (rank 0).
        own_address: of that table.
        timeout: of a rebuild.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        *,
        job: str,
        replica_id: str,
        group_rank: int,
        group_world_size: int,
        token: str | ClientToken | None,
        host: str,
        key_values: KeyValueServer | None,
        own_address: str,
        timeout: timedelta,
    ) -> None:
        self.pg = pg
        self._job = job
        self._replica_id = replica_id
        self._group_rank = group_rank
        self._group_world_size = group_world_size
        self._token = token
        self._host = host
        self._key_values = key_values
        self._own_address = own_address
        self._timeout = timeout
        self._has_accelerator = has_accelerator()
        self.device: int | None = None
        """Accelerator of the training thread, which the building thread uses too; None without one."""
        self.use_current_device()
        self._lock = threading.Lock()
        self._quorum_id = -1
        self._generation = 0
        self._broken = False
        self._store: RendezvousStore | None = None
        self._lost: dict[int, str] = {}
        self._aborts: list[concurrent.futures.Future[None]] = []
        self._building = threading.Lock()
        self._closed = False
        self.turns: list[str] = []
        """Of the members of the quorum for which this built last, by replica_rank; empty: they are not compared."""

    @property
    def broken(self) -> bool:
        """Whether the process group was aborted or could not be built, so that it needs a new quorum_id."""
        return self._broken

    @property
    def failed(self) -> bool:
        """Whether the process group failed, or is one that does not tell."""
        errored: Callable[[], Exception | None] | None = getattr(self.pg, "errored", None)  # not in torch's own
        return self._broken or errored is None or errored() is not None

    def use_current_device(self) -> None:
        """Build process groups for the accelerator that is current in this thread."""
        if self._has_accelerator:
            self.device = torch.accelerator.current_device_index()

    async def follow(self, plan: QuorumPlan, turn: str = "") -> bool:
        """Build the process group of ``plan``, unless it is built already.

        Args:
            plan: of the quorum.
            turn: of ``turns``; empty: the members do not compare it.

        Returns:
            Whether it was built now.

        Raises:
            Exception: the reason why it could not be built.
        """
        if plan.quorum_id == self._quorum_id and not self._broken:
            return False
        await asyncio.wrap_future(_in_thread("keepstep-reconfigure", lambda: self._build(plan, turn)))
        return True

    def _build(self, plan: QuorumPlan, turn: str) -> None:
        with self._building:
            self._build_locked(plan, turn)

    def _build_locked(self, plan: QuorumPlan, turn: str) -> None:
        if self.device is not None:
            torch.accelerator.set_device_index(self.device)
        with self._lock:
            self._generation += 1
            self.turns = []
            self._broken = True  # until it is built, so that an abort does not hit the new process group
            aborts, self._aborts = self._aborts, []
        concurrent.futures.wait(aborts, self._timeout.total_seconds())
        version = min(member.info.rendezvous for member in plan.members)
        self._check_room(plan, version)
        table = Table(self._job, plan.epoch, plan.quorum_id, self._group_rank)
        here = self._key_values if plan.store_address == self._own_address else None
        store = RendezvousStore(
            plan.store_address, table, timeout=self._timeout, token=self._token, server=here, version=version
        )
        with self._lock:
            if self._store is not None:
                self._store.close()
            self._store, self._quorum_id, self._broken = store, plan.quorum_id, False
            self._raise_if_lost(plan.quorum_id)
        try:
            if turn:
                self._exchange_turns(plan, store, turn)
            self._configure(plan, store)
        except BaseException:
            with self._lock:
                self._broken = True
            raise
        with self._lock:
            self._raise_if_lost(plan.quorum_id)

    def _check_room(self, plan: QuorumPlan, version: int) -> None:
        """Raise if the rendezvous is too small. All members compute the same, so no member waits for another."""
        if not isinstance(self.pg, ProcessGroup):
            return
        groups, ranks = plan.replica_world_size, self._group_world_size
        need = groups * ranks * self.pg.rendezvous_bytes(groups, version)
        if need <= MAX_TOTAL_BYTES:
            return
        remedy = "use fewer groups or fewer ranks in each"
        if self.pg.rendezvous_bytes(groups, VERSION) < self.pg.rendezvous_bytes(groups, version):
            old = next(member.replica_id for member in plan.members if member.info.rendezvous == version)
            remedy = f"{old} runs an older keepstep, which stores more for each group; update it, or {remedy}"
        raise KeepstepError(
            f"{groups} groups of {ranks} ranks need {need / 1e6:.1f} MB at the rendezvous of a rebuild (limit: "
            f"{MAX_TOTAL_BYTES / 1e6:.1f} MB): {remedy}"
        )

    def _configure(self, plan: QuorumPlan, store: RendezvousStore) -> None:
        rank, size = plan.replica_rank, plan.replica_world_size
        name = f"{self._job}/{plan.epoch}/{plan.quorum_id}/{self._group_rank}"
        pg: Any = self.pg
        if not hasattr(pg, "configure"):  # a process group of torch
            reconfigure_over(pg, store, rank, size, self._timeout, uuid=_number(name))
            return
        extra: dict[str, Any] = {}
        if isinstance(pg, ProcessGroup):  # a process group written for torchft does not know these
            pg.set_timeout(self._timeout)
            extra = {"store": store, "host": self._host}
        pg.configure(
            f"{plan.store_address}/{name}",
            self._replica_id,
            rank,
            size,
            plan.quorum_id,
            self._group_rank,
            self._group_world_size,
            [peer * self._group_world_size + self._group_rank for peer in range(size)],
            **extra,
        )

    def _exchange_turns(self, plan: QuorumPlan, store: RendezvousStore, turn: str) -> None:
        """Read the turns of all members. KeepstepError, once all members have read them: one is out of turn."""
        places = range(plan.replica_world_size)
        store.set(f"turn/{plan.replica_rank}", turn)
        self.turns = [one.decode() for one in store.multi_get([f"turn/{place}" for place in places])]
        if out_of_turn(self.turns, plan.cohort):
            store.set(f"turn/read/{plan.replica_rank}", b"")
            store.wait([f"turn/read/{place}" for place in places])
            raise KeepstepError("members began the step with different optimizers")

    def _raise_if_lost(self, quorum_id: int) -> None:
        if self._closed:
            self._broken = True
            raise KeepstepError("the Manager was shut down")
        if quorum_id in self._lost:
            self._broken = True
            raise KeepstepError(f"quorum {quorum_id} has ended already: {self._lost[quorum_id]}")

    def lost(self, quorum_id: int, reason: str) -> None:
        """Abort the process group if it belongs to ``quorum_id``, which has lost a member. From any thread."""
        with self._lock:
            self._lost[quorum_id] = reason
            while len(self._lost) > REMEMBERED:
                del self._lost[next(iter(self._lost))]
            is_current = quorum_id == self._quorum_id
        if is_current:
            self.abort(reason)

    def abort(self, reason: str) -> None:
        """End all collectives of the process group here and, as the connections end, at its peers. From any thread."""
        with self._lock:
            if self._broken or self._quorum_id < 0:
                return
            self._broken = True
            generation = self._generation
            if self._store is not None:
                self._store.abort(reason)
            self._aborts.append(_in_thread("keepstep-abort", lambda: self._abort(generation, reason)))

    def _abort(self, generation: int, reason: str) -> None:
        if generation != self._generation:
            return
        if isinstance(self.pg, ProcessGroup):
            self.pg.abort(reason)
        else:
            self.pg.abort()

    def shutdown(self) -> None:
        """End the process group, and the threads that build or abort it."""
        with self._lock:
            self._closed = True
        self.abort("shutting down")
        with self._building:
            concurrent.futures.wait(self._aborts, self._timeout.total_seconds())
            if self._store is not None:
                self._store.abort("shutting down")
                self._store.close()
            self.pg.shutdown()


def check_changeable(pg: dist.ProcessGroup) -> None:
    """Raise ValueError if ``pg`` cannot change its members."""
    if not (hasattr(pg, "configure") or _has_reconfigure(pg)):
        raise ValueError(
            f"pg is a {type(pg).__name__}, which cannot change its members: pass a process group of keepstep, or "
            f"one of torch >= 2.14 that was made with enable_reconfigure=True, over NCCL with the backend nccl2"
        )


def _has_reconfigure(pg: dist.ProcessGroup) -> bool:
    try:
        return bool(getattr(pg, "supports_reconfigure", False))
    except RuntimeError:  # of torch >= 2.14, for a process group without a backend
        return False


def _number(name: str) -> int:
    """Return the uuid of a membership: the same for all its members, and for no other membership."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def _in_thread(name: str, work: Callable[[], None]) -> concurrent.futures.Future[None]:
    """Run ``work`` in a daemon thread. The end of a script would wait for an executor's thread before it can abort."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            work()
        except BaseException as error:  # noqa: BLE001  the waiting thread gets it
            done.set_exception(error)
        else:
            done.set_result(None)

    start_or_run(Thread(target=run, name=name, daemon=True))
    return done
