"""A communicator on the streams of an accelerator.

``wait`` of an operation only makes the current stream wait, so a stuck peer appears as a stream without progress.
``StreamWatch`` aborts the communicator when an operation has not passed its stream in time. The kernels then end and
the stream continues with an invalid result. Therefore ``await_stream`` comes before the check of ``error``: a caller
that does both before it uses a reduced tensor never uses an invalid one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, Work
from torch.futures import Future

from keepstep.futures import context_timeout
from keepstep.process_group.group_errors import timed_out
from keepstep.process_group.torch_backends.backend_work import NO_TIMEOUT, BackendWork
from keepstep.process_group.torch_backends.communicator import Communicator
from keepstep.process_group.torch_backends.stream_watch import StreamWatch
from keepstep.process_group.torch_backends.torch_variables import environment
from keepstep.runtime.devices import begin_gpu_thread
from keepstep.runtime.exits import end_process
from keepstep.runtime.late_threads import start_or_run
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.threads.starting import Thread

log = get_logger("keepstep.process_group")

ABORT_SECONDS = 10.0
"""Limit of the wait for an abort in progress when a communicator is freed."""


def current_accelerator() -> torch.device:
    """Return the device that is current in this thread, on a machine that has an accelerator."""
    device: Any = torch.accelerator.current_accelerator()
    return torch.device(device.type, torch.accelerator.current_device_index())


class AcceleratorCommunicator(Communicator):
    """A communicator on torch's ``backend_class``. It initialises without blocking, so that it can be aborted.

    Args:
        backend_class: of torch.
        options: of that class.
        store: rendezvous of the members.
        rank: of this process among the members.
        size: number of members.
        timeout: of the connection and of each operation.
        variables: environment variables while the backend is created.
    """

    def __init__(
        self,
        backend_class: Any,
        options: Any,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(rank, size, timeout)
        self._backend_class = backend_class
        self._options = options
        self._store = store
        self._variables = variables or {}
        self._index: int | None = None
        """Of the device."""
        self._watch = StreamWatch(self.fail, lambda: begin_gpu_thread(self._index))
        self._connecting: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._abort: Thread | None = None
        self._stream_is_free = threading.Event()
        self._stream_is_free.set()

    def connect(self) -> None:
        """Connect in a thread, and wait for it or for ``fail``.

        While torch connects, it holds a lock that its ``abort`` needs. A thread that still connects after ``fail`` is
        left behind with its backend, and ends by torch's timeout.
        """
        device = current_accelerator()
        self._index = device.index
        Thread(target=self._connect_into, args=(device,), name="keepstep-nccl-connect", daemon=True).start()
        try:
            self._connecting.result()
        except concurrent.futures.CancelledError:
            if self.error is None:
                raise
            raise self.error from None

    def _connect_into(self, device: torch.device) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # `connect` no longer waits
            try:
                begin_gpu_thread(device.index)
                self._connect(device)
            except Exception as error:  # noqa: BLE001  the waiting thread gets it
                self._connecting.set_exception(error)
            else:
                self._connecting.set_result(None)
        if self._connecting.cancelled():
            abandoned: Any = self.backend
            self.backend = None
            if abandoned is not None:
                abandoned.abort()

    def _connect(self, device: torch.device) -> None:
        with environment(self._variables):
            # set before it connects, so that `interrupt` finds it; not in a local variable, see `start`
            self.backend = self._backend_class(self._store, self.rank, self.size, self._options)
        if self.error is not None:
            raise self.error
        self.start("eager_connect_single_device", (device,))
        self._run_first_collective(device)

    def _run_first_collective(self, device: torch.device) -> None:
        """Wait until all members are connected: ``eager_connect_single_device`` returns while they still connect."""
        with torch.Stream(device):
            tensor = torch.zeros(1, device=device)
            self.start("allreduce", ([tensor], dist.AllreduceOptions())).wait()
            torch.accelerator.current_stream().synchronize()

    def interrupt(self) -> None:
        store_abort = getattr(self._store, "abort", None)
        if store_abort is not None:
            store_abort(str(self.error))
        self._watch.stop()
        self._connecting.cancel()  # no effect once it is connected
        backend: Any = self.backend
        if backend is not None:
            self._abort_backend(backend)
        self._limit_stream_wait()

    def _abort_backend(self, backend: Any) -> None:
        thread = Thread(target=backend.abort, name="keepstep-nccl-abort", daemon=True)
        self._abort = thread if start_or_run(thread) else None

    def close(self) -> None:
        if self._abort is not None and not self._connecting.cancelled():
            self._abort.join(ABORT_SECONDS)
            if self._abort.is_alive():
                log.warning("abort of the communicator did not return in time", limit_seconds=ABORT_SECONDS)
        self._watch.join()
        super().close()

    def mark(self) -> torch.Event:
        """Return an event that completes when the current stream has done its present work."""
        mark = torch.Event()
        mark.record()
        return mark

    def expect(self, timeout: timedelta, begun: torch.Event) -> None:
        """Fail the communicator unless the current stream does its present work within ``timeout`` of ``begun``."""
        self._watch.add(timeout, begun, self.mark())

    def await_stream(self) -> None:
        """Wait until the current stream has done its present work.

        If an abort does not free it, the process ends: its memory may change at any time. A forked child does not wait,
        because it cannot use the accelerator.
        """
        if self.is_forked:
            return
        self._stream_is_free.clear()
        if self.error is not None:
            self._limit_stream_wait()
        try:
            torch.accelerator.current_stream().synchronize()
        finally:
            self._stream_is_free.set()

    def _limit_stream_wait(self) -> None:
        """End this process if a wait for a stream of this failed communicator takes too long."""
        limit = ABORT_SECONDS + self.timeout.total_seconds()

        def end_if_stuck() -> None:
            if not self._stream_is_free.wait(limit):
                end_process(f"an abort did not free the accelerator within {limit:g} s ({self.error})", stacks=True)

        if not self._stream_is_free.is_set():
            Thread(target=end_if_stuck, name="keepstep-stuck-stream", daemon=True).start()


class AcceleratorWork(BackendWork):
    """An operation on the stream of an accelerator."""

    ends_in_wait = False

    _communicator: AcceleratorCommunicator

    def __init__(self, communicator: AcceleratorCommunicator, raw: Work, operation: str, tensors: Any) -> None:
        super().__init__(communicator, raw, operation, tensors)
        self._begun = communicator.mark()
        """Completes when the work is done that the operation follows."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Make the current stream wait. ``errored`` of the group returns failures that occur later."""
        limit = timeout if timeout > NO_TIMEOUT else self._communicator.timeout
        if self._operation == "barrier":  # the only operation that blocks the caller
            with context_timeout(lambda: self._late(limit), limit):
                super().wait()
        else:
            super().wait()
        self._communicator.expect(limit, self._begun)
        return True

    def get_future(self) -> Future[Any]:
        """Return torch's future, which handles streams. ``errored`` of the group returns failures that occur later."""
        timeout, begun = self._communicator.timeout, self._begun

        def expected(future: Future[Any]) -> Any:
            # runs on a stream of torch that follows the operation's; the current stream need not follow it
            self._communicator.expect(timeout, begun)
            return future.value()

        return (super().get_future() if self._raw is None else self._raw.get_future()).then(expected)

    def _poll(self, raw: Work, limit: timedelta) -> bool:  # noqa: ARG002
        return raw.wait()

    def _late(self, limit: timedelta) -> None:
        self._communicator.fail(timed_out(self._operation, limit))
