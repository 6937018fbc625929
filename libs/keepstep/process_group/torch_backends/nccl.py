"""NCCL and XCCL: collectives on an accelerator, on the streams of their communicator.

On an accelerator ``wait`` only makes the current stream wait, so a stuck peer appears as a stream without progress. A
watcher thread aborts the communicator when an operation has not passed its stream in time. The kernels then end and the
stream continues with an invalid result. Therefore ``errored`` synchronizes the stream first: a caller that checks it
before it uses a reduced tensor never uses an invalid one. torch's own watchdog, which ends the process, is disabled.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, Work
from torch.futures import Future

from keepstep.futures import context_timeout
from keepstep.process_group.base import ProcessGroupError
from keepstep.process_group.torch_backends.backend import BackendProcessGroup
from keepstep.process_group.torch_backends.backend_work import NO_TIMEOUT, BackendWork
from keepstep.process_group.torch_backends.communicator import Communicator
from keepstep_mesh.config.logging import get_logger

log = get_logger("keepstep.process_group")

ABORT_SECONDS = 10.0
"""Limit of the wait for an abort in progress when a communicator is freed."""

_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # this module aborts; the watchdog would end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


class AcceleratorCommunicator(Communicator):
    """A communicator on torch's ``backend_class``. It initialises without blocking, so that it can be aborted."""

    def __init__(
        self, backend_class: Any, options: Any, store: Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, size, timeout)
        self._backend_class = backend_class
        self._options = options
        self._store = store
        self._watch = _StreamWatch(self)
        self._abort: threading.Thread | None = None

    def connect(self) -> None:
        # set before it connects, so that `interrupt` finds it; not in a local variable, see `start`
        self.backend = self._backend_class(self._store, self.rank, self.size, self._options)
        if self.error is not None:
            raise self.error
        device: Any = torch.accelerator.current_accelerator()
        index = torch.accelerator.current_device_index()
        self.start("eager_connect_single_device", (torch.device(device.type, index),))

    def interrupt(self) -> None:
        store_abort = getattr(self._store, "abort", None)
        if store_abort is not None:
            store_abort(str(self.error))
        self._watch.stop()
        backend: Any = self.backend
        if backend is not None:
            self._abort = threading.Thread(target=backend.abort, name="keepstep-nccl-abort", daemon=True)
            self._abort.start()

    def close(self) -> None:
        if self._abort is not None:
            self._abort.join(ABORT_SECONDS)
            if self._abort.is_alive():
                log.warning("abort of the communicator did not return in time", limit_seconds=ABORT_SECONDS)
        self._watch.join()
        super().close()

    def expect(self, timeout: timedelta) -> None:
        """Fail the communicator unless the current stream finishes its present work within ``timeout``."""
        self._watch.add(timeout)


class AcceleratorWork(BackendWork):
    """An operation on the stream of an accelerator."""

    _communicator: AcceleratorCommunicator

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Make the current stream wait. ``errored`` of the group returns failures that occur later."""
        limit = timeout if timeout > NO_TIMEOUT else self._communicator.timeout
        if self._operation == "barrier":  # the only operation that blocks the caller
            with context_timeout(lambda: self._late(limit), limit):
                super().wait()
        else:
            super().wait()
        self._communicator.expect(limit)
        return True

    def get_future(self) -> Future[Any]:
        """Return torch's future, which handles streams. ``errored`` of the group returns failures that occur later."""
        timeout = self._communicator.timeout

        def expected(future: Future[Any]) -> Any:
            # runs on a stream of torch that follows the operation's; the current stream need not follow it
            self._communicator.expect(timeout)
            return future.value()

        return (super().get_future() if self._raw is None else self._raw.get_future()).then(expected)

    def _poll(self, raw: Work, limit: timedelta) -> bool:  # noqa: ARG002
        return raw.wait()

    def _late(self, limit: timedelta) -> None:
        self._communicator.fail(
            TimeoutError(f"{self._operation} took longer than {limit}: a peer is stuck or disconnected")
        )


class _StreamWatch:
    """Fails a communicator when a stream does not pass a mark in time. Its thread runs while marks are pending."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._changed = threading.Condition()
        self._marks: collections.deque[tuple[float, timedelta, torch.Event]] = collections.deque()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, timeout: timedelta) -> None:
        mark = torch.Event()
        mark.record()
        with self._changed:
            while self._marks and self._marks[0][2].query():
                self._marks.popleft()
            self._marks.append((time.monotonic() + timeout.total_seconds(), timeout, mark))
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="keepstep-stream-watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(ABORT_SECONDS)

    def _run(self) -> None:
        late = None
        with self._changed:
            while not self._stopped and late is None:
                while self._marks and self._marks[0][2].query():
                    self._marks.popleft()
                if not self._marks:
                    self._thread = None
                    return
                due, timeout, _ = self._marks[0]
                if due <= time.monotonic():
                    late = timeout
                else:
                    self._changed.wait(due - time.monotonic())
            self._marks.clear()
        if late is not None:
            self._communicator.fail(
                TimeoutError(f"a collective took longer than {late}: a peer is stuck, slow or disconnected")
            )


class ProcessGroupNCCL(BackendProcessGroup):
    """A process group on NCCL, for CUDA tensors on the device that is current during ``configure``.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.

    Raises:
        ProcessGroupError: torch was built without NCCL, or this machine has no accelerator.
    """

    _backend_name = "NCCL"

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._torch_class = require_accelerator(self._backend_name, type(self).__name__)

    def getBackendName(self) -> str:  # noqa: N802
        return f"keepstep-{self._backend_name.lower()}"

    def errored(self) -> Exception | None:
        """Wait for the current stream; then return the first error since the last ``configure``.

        The watcher ends the wait if the stream is stuck.
        """
        if self._communicator is not None:
            torch.accelerator.current_stream().synchronize()
        return super().errored()

    def _create(
        self,
        store: Store,
        host: str | None,  # noqa: ARG002  # NCCL reads NCCL_SOCKET_IFNAME instead
        rank: int,
        world_size: int,
        name: str,
        global_ranks: list[int] | None,
    ) -> AcceleratorCommunicator:
        options = self._options()
        options.group_name = name
        options.global_ranks_in_group = global_ranks or []
        return AcceleratorCommunicator(self._torch_class, options, store, rank, world_size, self._timeout)

    def _options(self) -> Any:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(self._timeout.total_seconds()) or 1))
        options = self._torch_class.Options()
        options.config.blocking = 0
        return options

    def _wrap(self, communicator: Communicator, raw: Work, operation: str, tensors: Any) -> AcceleratorWork:
        return AcceleratorWork(communicator, raw, operation, tensors)


def require_accelerator(backend: str, name: str) -> Any:
    """Return torch's process group class of ``backend``.

    Raises:
        ProcessGroupError: torch was built without it, or this machine has no accelerator. It names class ``name``.
    """
    torch_class = getattr(dist, f"ProcessGroup{backend}", None)
    if torch_class is None or not torch.accelerator.is_available():
        raise ProcessGroupError(
            f"{name} requires a torch build with {backend} and an accelerator; use ProcessGroupGloo on this machine"
        )
    return torch_class


class ProcessGroupXCCL(ProcessGroupNCCL):
    """A process group on Intel's XCCL.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.

    Raises:
        ProcessGroupError: torch was built without XCCL, or this machine has no accelerator.
    """

    _backend_name = "XCCL"

    def _options(self) -> Any:
        return self._torch_class.Options()
