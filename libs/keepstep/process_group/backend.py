"""The shared body of the groups that really communicate: one ``Communicator`` per configuration, and its works.

A work belongs to the communicator that it was started on, so what goes wrong late with an old one cannot touch the
group's present. The first failure of a communicator is its end: its connections are cut, so that every operation in
flight here ends within a millisecond and every peer learns of it at once. ``wait`` returns or raises only when the
operation has let go of its tensors, so a late result never lands in a gradient.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, cast

import structlog
import torch
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Backend, PrefixStore, Store, Work
from torch.futures import Future

from keepstep.process_group.base import ProcessGroup, ProcessGroupAbortedError, ProcessGroupError
from keepstep.process_group.works import JointWork
from keepstep_mesh.errors import KeepstepError

log = structlog.get_logger("keepstep.process_group")

_SINGLE = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""What a backend is asked for, tensor by tensor, instead."""
NO_TIMEOUT = timedelta(0)
"""To torch: the operation's own timeout."""


_GLOO_PLACE = re.compile(r"\[/[^\]]*\] ")
_GLOO_ADVICE = re.compile(r"\. This is typically caused by .*", re.DOTALL)


class Communicator(ABC):
    """One configuration of a process group, from its rendezvous to its end."""

    backend: Backend | None = None

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.error: Exception | None = None
        self._in_flight: weakref.WeakSet[BackendWork] = weakref.WeakSet()
        self._lock = threading.Lock()

    @abstractmethod
    def connect(self) -> None:
        """Meets the peers and sets ``backend``. Ends soon after ``interrupt``."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ends what is in flight, ``connect`` included. From any thread; never blocks for long."""

    def started(self, work: BackendWork) -> None:
        """``close`` waits until this work has let go of its tensors."""
        with self._lock:
            self._in_flight.add(work)

    def fail(self, error: Exception) -> Exception:
        """Notes the first error and cuts the connections. Returns the error that counts."""
        with self._lock:
            if self.error is not None:
                return self.error
            self.error = error
        self.interrupt()
        return error

    def close(self) -> None:
        """Frees everything, after ``fail``. No operation writes to a tensor of the user's after it."""
        with self._lock:
            in_flight = list(self._in_flight)
        for work in in_flight:
            work.finish()
        backend, self.backend = [self.backend], None
        if backend[0] is not None:  # torch's destructor waits up to 20 ms for a thread of its own
            threading.Thread(target=backend.clear, name="keepstep-disposal").start()


class BackendWork(Work):
    """An operation in flight."""

    def __init__(self, communicator: Communicator, raw: Work, operation: str) -> None:
        super().__init__()
        self._communicator = communicator
        self._raw: Work | None = raw
        self._operation = operation
        self._future: Future[Any] | None = None
        communicator.started(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits until the operation is over, at most ``timeout`` (0: the operation's own).

        :raises TimeoutError: it took too long; the group is broken then.
        :raises ProcessGroupError: it failed or was aborted; the group is broken then.
        """
        raw = self._raw
        if raw is None:
            return self._over()
        try:
            done = raw.wait(timeout)
        except RuntimeError as error:
            del raw  # the traceback would keep it, and with it the sockets of the group
            raise self._failed(error, timeout) from error
        self._raw = None  # torch's work keeps the communicator's threads and sockets
        return done

    def get_future(self) -> Future[Any]:
        """Completes with the tensors, or the error, when the operation is over."""
        if self._future is None:
            if self._raw is None:
                self._over()
                raise ProcessGroupError(f"{self._operation} is over and was waited for: it has no future any more")
            self._future = self._raw.get_future()
            self._future.add_done_callback(self._note)
        return self._future

    def is_completed(self) -> bool:
        return self._raw is None or self._raw.is_completed()

    def is_success(self) -> bool:
        return self._communicator.error is None if self._raw is None else self._raw.is_success()

    def exception(self) -> Any:
        return self._communicator.error if self._raw is None else self._raw.exception()

    def result(self) -> list[torch.Tensor]:
        return [] if self._raw is None else self._raw.result()

    def synchronize(self) -> None:
        if self._raw is not None:
            self._raw.synchronize()

    def finish(self) -> None:
        """Waits, once the connections are cut, until the operation has let go of its tensors."""
        raw, self._raw = self._raw, None
        if raw is not None and not raw.is_completed():
            with contextlib.suppress(RuntimeError):  # it fails, as it was made to
                raw.wait(self._communicator.timeout)

    def _over(self) -> bool:
        if self._communicator.error is not None:
            raise self._failure() from self._communicator.error
        return True

    def _note(self, future: Future[Any]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            self._communicator.fail(ProcessGroupError(f"{self._operation} failed: {_plain(error)}"))

    def _failure(self) -> ProcessGroupError:
        error = self._communicator.error
        kind = ProcessGroupAbortedError if isinstance(error, ProcessGroupAbortedError) else ProcessGroupError
        return kind(f"{self._operation} failed: {error}")

    def _failed(self, error: RuntimeError, timeout: timedelta) -> Exception:
        failure: Exception
        if "imed out" in str(error):
            limit = timeout if timeout > NO_TIMEOUT else self._communicator.timeout
            failure = TimeoutError(f"{self._operation} took longer than {limit}: a peer is stuck, slow or gone")
        else:
            failure = ProcessGroupError(f"{self._operation} failed: {_plain(error)}")
        first = self._communicator.fail(failure)
        self.finish()
        return failure if first is failure else self._failure()


class BackendProcessGroup(ProcessGroup):
    """A process group on one of torch's backends. ``timeout`` bounds the rendezvous and each operation."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__()
        self._timeout = timeout
        self._communicator: Communicator | None = None

    @abstractmethod
    def _create(
        self, store: Store, host: str | None, rank: int, world_size: int, name: str, global_ranks: list[int] | None
    ) -> Communicator:
        """A communicator that is yet to connect. ``name`` is for logs and traces."""

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,  # noqa: ARG002
        global_ranks: list[int] | None = None,
        *,
        store: Store | None = None,
        host: str | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a group of {world_size}")
        self.shutdown()
        store = store if store is not None else _tcp_store(store_addr, self._timeout)
        name = f"{replica_id}/{group_rank or 0}@{quorum_id}"
        communicator = self._communicator = self._create(store, host, rank, world_size, name, global_ranks)
        try:
            communicator.connect()
        except Exception as error:
            failure = error
            if not isinstance(error, KeepstepError | TimeoutError):
                failure = ProcessGroupError(f"{name}, rank {rank} of {world_size}, did not connect: {_plain(error)}")
            first = communicator.fail(failure)
            communicator.close()
            if first is not failure:
                raise ProcessGroupAbortedError(f"configure was aborted: {first}") from error
            if failure is error:
                raise
            raise failure from error
        if communicator.error is not None:
            communicator.close()
            raise ProcessGroupAbortedError(f"configure was aborted: {communicator.error}")

    def abort(self, reason: str | None = None) -> None:
        communicator = self._communicator
        if communicator is not None and communicator.error is None:
            reason = reason or "the process group was aborted"
            log.info("process group aborted", backend=self.getBackendName(), reason=reason)
            communicator.fail(ProcessGroupAbortedError(reason))

    def errored(self) -> Exception | None:
        return None if self._communicator is None else self._communicator.error

    def shutdown(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.fail(ProcessGroupAbortedError("the process group was shut down"))
            communicator.close()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        communicator = self._communicator
        if communicator is not None and communicator.backend is not None:
            communicator.timeout = timeout
            communicator.backend.set_timeout(timeout)  # type: ignore[attr-defined]  # torch's stub lacks it

    def rank(self) -> int:
        return 0 if self._communicator is None else self._communicator.rank

    def size(self) -> int:
        return 1 if self._communicator is None else self._communicator.size

    def _run(self, operation: str, *args: Any) -> Work:
        communicator = self._communicator
        if communicator is None:
            raise ProcessGroupError(f"{operation} on a process group that is not configured")
        backend = communicator.backend
        if communicator.error is not None or backend is None:
            raise ProcessGroupError(
                f"{operation} on a process group that is broken until it is configured again: {communicator.error}"
            ) from communicator.error
        single = _SINGLE.get(operation)
        if single is None:
            return self._start(communicator, backend, operation, args)
        outputs, inputs, options = args
        pairs = zip(outputs, inputs, strict=True)
        return JointWork([self._start(communicator, backend, single, (*pair, options)) for pair in pairs], outputs)

    def _start(self, communicator: Communicator, backend: Backend, operation: str, args: tuple[Any, ...]) -> Work:
        try:
            raw = cast("Work", getattr(backend, operation)(*args))
        except RuntimeError as error:
            if communicator.error is None and not _is_connection_error(error):
                raise  # the caller's mistake: the group is sound
            failure = ProcessGroupError(f"{operation} failed: {_plain(error)}")
            communicator.fail(failure)
            raise failure from error
        return self._wrap(communicator, raw, operation)

    def _wrap(self, communicator: Communicator, raw: Work, operation: str) -> BackendWork:
        return BackendWork(communicator, raw, operation)


def _plain(error: Exception) -> str:
    """What Gloo says without the places in its source and its guess."""
    return _GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", str(error)))


def _is_connection_error(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def _tcp_store(address: str, timeout: timedelta) -> Store:
    """The store at ``host:port/prefix``."""
    place, _, prefix = address.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the store address {address!r} is not host:port/prefix")
    tcp = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(prefix, tcp)
