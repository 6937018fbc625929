"""Works that are complete from the start, and works that combine others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future


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
