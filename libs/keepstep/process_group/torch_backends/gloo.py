"""Gloo: collectives over TCP for tensors in main memory."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import BarrierOptions, PrefixStore, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo as TorchGloo

from keepstep.futures import context_timeout
from keepstep.process_group.group_errors import ProcessGroupAbortedError, timed_out
from keepstep.process_group.torch_backends.backend import BackendProcessGroup, ProcessGroupShutDownError
from keepstep.process_group.torch_backends.backend_work import BackendWork, GlooWork, ThreadedWork
from keepstep.process_group.torch_backends.communicator import Communicator, Operation
from keepstep.process_group.torch_backends.gloo_sockets import (
    Found,
    GlooRank,
    Sockets,
    are_open,
    find,
    finish_sending,
    greet,
    shut_down,
)
from keepstep.process_group.works import AveragedWork
from keepstep.rendezvous.interruptible_store import UNKNOWN_VERSION, InterruptibleStore
from keepstep.runtime.late_threads import start_or_run
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.addresses import address_towards
from keepstep_mesh.net.fork_safety import claim_opened
from keepstep_mesh.net.process_sockets import Endpoint
from keepstep_mesh.threads.starting import Thread
from keepstep_mesh.threads.watchdog import watched

log = get_logger("keepstep.process_group")

_GLOO: Any = TorchGloo  # torch's stubs do not describe it
_THREADED = frozenset({"send", "recv", "reduce_scatter", "_reduce_scatter_base"})
SHORT_ADDRESSES = 2
"""Lowest version of the rendezvous whose members read shortened addresses."""
FIRST_BARRIER = 3
"""Lowest version of the rendezvous whose members wait for each other in a barrier once they are connected."""
_MEETS = "meets/{}"
"""Key of a member that waits in that barrier, in a store that does not know the version of all members."""
_SHORT = b"\xff" * 8
"""Prefix of a shortened address. An address of Gloo begins with the length of the host name."""
ADDRESS_BYTES = 384
"""Size of an address at the rendezvous: 136 for the socket address, 64 for the host name, the rest for overhead."""
RESCUE_SECONDS = 0.02
"""Interval between attempts to end a constructor that waits for peers."""
RESCUE_LIMIT_SECONDS = 30.0
"""Limit of these attempts."""


class ProcessGroupGloo(BackendProcessGroup):
    """A process group on Gloo that can be aborted and configured again any number of times.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.
    """

    works_report_all_errors = True

    def getBackendName(self) -> str:  # noqa: N802
        return "keepstep-gloo"

    def rendezvous_bytes(self, world_size: int, version: int) -> int:
        return ADDRESS_BYTES + (0 if version >= SHORT_ADDRESSES else 8 * world_size)

    def _create(
        self, store: Store, host: str | None, rank: int, world_size: int, name: str, global_ranks: list[int] | None
    ) -> Communicator:
        host = host or address_towards(host_of(store))
        return GlooCommunicator(store, host, rank, world_size, name, global_ranks, self._timeout)

    def _run(self, operation: str, *args: Any) -> Work:
        options = args[-1]
        if getattr(options, "reduceOp", None) != ReduceOp.AVG:
            return super()._run(operation, *args)
        summed = type(options)()
        summed.reduceOp, summed.timeout = ReduceOp.SUM, options.timeout
        work = super()._run(operation, *args[:-1], summed)
        outputs = args[0] if isinstance(args[0], list) else [args[0]]
        return AveragedWork(work, outputs, self.size())

    def _wrap(self, communicator: Communicator, raw: Work, operation: str, tensors: Any) -> BackendWork:
        kind = ThreadedWork if operation in _THREADED else GlooWork
        return kind(communicator, raw, operation, tensors)


class GlooCommunicator(Communicator):
    can_lose_a_peer = True

    def __init__(
        self,
        store: Store,
        host: str,
        rank: int,
        size: int,
        name: str,
        global_ranks: list[int] | None,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, size, timeout)
        self._store = _ObservedStore(store, self, timeout)
        self._options: Any = _GLOO._Options()  # noqa: SLF001  # its only name in torch
        self._options._timeout = timeout  # noqa: SLF001
        self._options.group_name = name
        self._options.global_ranks_in_group = global_ranks or []
        self._host = host
        self._rescue_lock = threading.Lock()
        self._connected = threading.Event()
        """Set when the constructor of Gloo has returned."""
        self._has_met = False
        """Whether the members are connected."""
        self._connections: Sockets | None = None
        """Those of this rank, once ``connect`` is over."""
        self._rescue: Thread | None = None

    def connect(self) -> None:
        with claim_opened(self._sockets):
            self._connect()

    def _connect(self) -> None:
        with context_timeout(self._fail_overdue, self.timeout):  # Gloo waits without limit for peers
            self._construct()
            if self.size > 1 and self.error is None and self._store.all_meet():
                # else a member that soon shuts down could end the connections of one that has not noticed all of them
                name = f"configure of rank {self.rank} of {self.size}"
                GlooWork(self, self.start("barrier", (BarrierOptions(),)), name, []).wait()
        self._has_met = True

    def _construct(self) -> None:
        try:
            self._options._devices = [_GLOO.create_device(hostname=self._host, lazy_init=False)]  # noqa: SLF001
            self._store.tell_that_this_meets()
            self.backend = _GLOO(self._store, self.rank, self.size, self._options)
        finally:
            self._connected.set()
            with self._rescue_lock:
                rescue = self._rescue
            if rescue is not None:
                rescue.join_or_end_process()
            self._options._devices = []  # noqa: SLF001

    def _find(self, *, connecting: bool = False) -> Found:
        own = self._store.own
        return Found() if own is None else find(own.listener, self._store.peers, connecting=connecting)

    def _sockets(self) -> Sockets:
        """Return those that a forked child must not keep; and keep in mind the connections, to find them at once."""
        found = self._find(connecting=not self._connected.is_set())
        if self._has_met and self._connections is None:
            self._connections = found.own()
        return found.all()

    def _fail_overdue(self) -> None:
        self.fail(timed_out("the connection of all members", self.timeout))

    def interrupt(self) -> None:
        self._store.abort()
        with self._rescue_lock:
            if not self._connected.is_set() and self._rescue is None:
                rescue = Thread(target=self._free_constructor, name="keepstep-gloo-abort", daemon=True)
                self._rescue = rescue if start_or_run(rescue) else None
        if isinstance(self.error, ProcessGroupShutDownError) and self.is_idle():
            self._ended = finish_sending(self._connections or [])
        else:
            self._shut_down()

    def is_idle(self) -> bool:
        return self._connections is not None and super().is_idle() and not self.has_forgotten

    def started(self, work: Operation) -> None:
        super().started(work)
        if self.error is not None:  # it began beside the end of the group, which left the connections half open
            self._shut_down()

    def has_lost_a_peer(self) -> bool:
        found = self._connections
        if found is None:
            found = self._find().own()
        return len(found) < self.size - 1 or not are_open(found)

    def _shut_down(self, *, connecting: bool = False) -> None:
        found = self._connections
        shut_down(self._find(connecting=connecting).own() if found is None else found)

    def _free_constructor(self) -> None:
        """End a constructor that waits for peers, whether they must connect to this rank or must answer it."""
        greetings: list[socket.socket] = []
        with watched("an aborted rendezvous of Gloo", RESCUE_LIMIT_SECONDS):
            while not self._connected.is_set():
                with contextlib.suppress(MemoryError, OSError):  # the next attempt may succeed
                    self._shut_down(connecting=True)
                    own = self._store.own
                    if own is not None:
                        greetings += greet(own.listener, own.sequence_numbers or tuple(range(self.size)))
                self._connected.wait(RESCUE_SECONDS)
        for greeting in greetings:
            greeting.close()


class _ObservedStore(Store):
    """Forwards Gloo's calls to a store and records the addresses. A wait ends when the communicator fails."""

    def __init__(self, inner: Store, communicator: Communicator, timeout: timedelta) -> None:
        super().__init__()
        self._inner = inner
        self._version = inner.version if isinstance(inner, InterruptibleStore) else UNKNOWN_VERSION
        self._communicator = communicator
        self._timeout = timeout
        self._aborted = threading.Event()
        self.own: GlooRank | None = None
        self.peers: set[Endpoint] = set()

    def abort(self) -> None:
        self._aborted.set()
        if isinstance(self._inner, InterruptibleStore):
            self._inner.abort(str(self._communicator.error))

    def tell_that_this_meets(self) -> None:
        """Tell the others, before they get the address, that this member waits for them in a barrier."""
        if self._version == UNKNOWN_VERSION:
            self._check()
            self._inner.set(_MEETS.format(self._communicator.rank), "")

    def all_meet(self) -> bool:
        """Return whether all members wait in a barrier. The same in all of them, after they have all addresses."""
        if self._version != UNKNOWN_VERSION:
            return self._version >= FIRST_BARRIER
        self._check()
        return self._inner.check([_MEETS.format(rank) for rank in range(self._communicator.size)])

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the type that torch passes
        self._check()
        self.own = self._parse(value)
        if self._version >= SHORT_ADDRESSES:
            value = shortened(value, self._communicator.size)
        self._inner.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self._check()
        value = lengthened(bytes(self._inner.get(key)), self._communicator.size)
        rank = self._parse(value)
        if rank is not None and rank != self.own:
            self.peers.add(rank.listener)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._timeout
        if isinstance(self._inner, InterruptibleStore):
            self._inner.wait(keys, limit)
            return
        deadline = time.monotonic() + limit.total_seconds()
        while not self._inner.check(list(keys)):
            if time.monotonic() >= deadline:
                raise timed_out(f"waiting for {', '.join(keys)} in the store", limit)
            self._aborted.wait(0.005)
            self._check()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise ProcessGroupAbortedError(str(self._communicator.error))

    def _parse(self, value: bytes) -> GlooRank | None:
        try:
            return GlooRank.parse(value)
        except ValueError as error:
            log.warning("cannot abort gloo", reason=str(error), consequence="a stuck peer blocks for the whole timeout")
            return None


def host_of(store: Store) -> str:
    """Return the host of the store; ``localhost`` if it has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, InterruptibleStore) else getattr(store, "host", "")
    return str(host or "localhost")


# ---- addresses for the rendezvous, whose size does not grow with the number of members


def _numbers(size: int) -> bytes:
    return struct.pack(f"={size}q", *range(size))


def shortened(published: bytes, size: int) -> bytes:
    """Return the address that Gloo publishes for a rank, without the numbers if they are 0 to ``size`` - 1.

    Gloo appends a number of 8 bytes for each member to an address, and every member reads all addresses: N members
    store 8 N^2 bytes and read 8 N^3. Here each communicator has a device of its own, on which the numbers are always
    0 to N - 1.
    """
    numbers = _numbers(size)
    if published.startswith(_SHORT) or not published.endswith(numbers):
        return published
    return _SHORT + published[: -len(numbers)]


def lengthened(stored: bytes, size: int) -> bytes:
    """Undo ``shortened``. Return any other address unchanged."""
    return stored.removeprefix(_SHORT) + _numbers(size) if stored.startswith(_SHORT) else stored
