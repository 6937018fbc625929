"""The Work that ``Manager.allreduce`` returns: an error is reported to the Manager, never raised."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future


class ManagedWork(dist.Work):
    """One collective under a Manager.

    Args:
        work: the collective of the process group, None when there is nothing to wait for.
        value: what the future gives, whether it worked or not.
        finish: runs once after success, before anybody sees the value (an average's division).
        report: called with the error when it failed.
        ok: with ``work`` None, what ``wait`` gives.
    """

    def __init__(
        self,
        work: dist.Work | None,
        value: object,
        finish: Callable[[], None] = lambda: None,
        report: Callable[[Exception], None] = lambda _: None,
        ok: bool = True,
    ) -> None:
        super().__init__()
        self._value = value
        self._ok = ok
        self.after: Callable[[], None] | None = None
        """Runs on the training thread in ``should_commit``, once all passes are over, if the collective succeeded."""
        if work is None:
            self._future: Future[Any] = Future()
            self._future.set_result(value)
            return

        def settle(source: Future[Any]) -> object:
            try:
                source.value()
                finish()
            except Exception as error:  # noqa: BLE001  a collective may fail in any way; the step then does not commit
                self._ok = False
                report(error)
            return value

        self._future = work.get_future().then(settle)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  the process group keeps the deadline
        """True when the collective succeeded."""
        self._future.wait()
        return self._ok

    def is_completed(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait(timeout)

    def get_future(self) -> Future[Any]:
        """Completes with the tensor; never holds an exception."""
        return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._value) if isinstance(self._value, (list, tuple)) else [self._value]  # type: ignore[list-item]
