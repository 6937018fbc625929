"""Works that are complete from the start, that another thread ends, and that combine or change others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from keepstep.runtime.failed_future import complete_future


def writing(tensors: Sequence[torch.Tensor]) -> torch.inference_mode:
    """Return a block that may write to tensors of inference mode, which is off in callbacks and other threads."""
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))


class CompletedWork(Work):
    """A complete work. Its future holds ``result``, the tensors of the operation."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class PendingWork(Work):
    """An operation that another thread ends, with ``_end``.

    Args:
        tensors: result of the operation, and value of its future.
        devices: CUDA devices of the tensors.
    """

    def __init__(self, tensors: Any, devices: list[int | str | torch.device] | None = None) -> None:
        super().__init__()
        self._tensors = tensors
        self._over = threading.Event()
        self._error: Exception | None = None
        self._future: Future[Any] = Future(devices=devices)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation is over.

        Args:
            timeout: limit of the wait, after which the group is aborted; 0: the timeout of the operation.

        Returns:
            True.

        Raises:
            TimeoutError: the operation took too long. The group must be configured again.
            ProcessGroupError: the operation failed or was aborted. The group must be configured again.
        """
        if not self._over.wait(self._seconds(timeout)):
            self._time_out(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _seconds(self, timeout: timedelta) -> float | None:
        """Return the limit of a wait in seconds; None: the operation has one of its own."""
        raise NotImplementedError  # torch's metaclass of Work is not ABCMeta: no abstractmethod

    def _time_out(self, timeout: timedelta) -> None:
        """Abort the group after the limit of a wait, and wait until the operation is over."""
        raise NotImplementedError  # torch's metaclass of Work is not ABCMeta: no abstractmethod

    def _end(self, error: Exception | None) -> None:
        """Complete the operation. Call it once."""
        self._error = error
        self._over.set()
        complete_future(self._future, self._tensors, error)

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the tensors, or the error, when the operation is over."""
        return self._future

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def synchronize(self) -> None:
        self.wait()


class StreamWork(Work):
    """Operations that are queued on the current stream of the device of ``tensors``, as one work."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._queued = torch.Event(tensors[0].device)
        self._queued.record()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  the process group watches the stream
        """Make the current stream wait."""
        self._queued.wait()
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future(devices=list({one.device for one in self._tensors}))
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return self._queued.query()

    def synchronize(self) -> None:
        self.wait()


class AveragedWork(Work):
    """A sum of ``size`` ranks that becomes their average, for backends without one.

    Integers are divided as by NCCL: towards zero.
    """

    def __init__(self, work: Work, tensors: list[torch.Tensor], size: int) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._size = size
        self._dividing = threading.Lock()
        self._divided = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        succeeded = self._work.wait(timeout)
        self._divide()
        return succeeded

    def get_future(self) -> Future[Any]:
        def average(future: Future[Any]) -> Any:
            result = future.value()
            self._divide()
            return result

        return self._work.get_future().then(average)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def _divide(self) -> None:
        with self._dividing:
            if self._divided:
                return
            self._divided = True
            with writing(self._tensors):
                for tensor in self._tensors:
                    whole = tensor.is_floating_point() or tensor.is_complex()
                    tensor.div_(self._size, rounding_mode=None if whole else "trunc")


class JointWork(Work):
    """Several works as one. Its future completes after all of them, with ``tensors`` or the first error."""

    def __init__(self, works: list[Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all works; then raise the first error, if any."""
        succeeded, first = True, None
        for work in self._works:
            try:
                succeeded &= work.wait(timeout)
            except Exception as error:  # noqa: BLE001  raised below
                first = first or error
        if first is not None:
            raise first
        return succeeded

    def get_future(self) -> Future[Any]:
        def tensors(works: Future[list[Future[Any]]]) -> list[torch.Tensor]:
            for work in works.value():
                work.value()
            return self._tensors

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(tensors)
