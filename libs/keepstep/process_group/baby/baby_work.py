"""An operation in a child process, as a work of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from keepstep.process_group.baby.operations import PackedCall
from keepstep.process_group.group_errors import (
    ProcessGroupAbortedError,
    ProcessGroupError,
    ProcessGroupTimeoutError,
    timed_out,
)
from keepstep.process_group.works import PendingWork

GRACE_SECONDS = 1.0
"""Time that the child has to report the timeout of an operation itself."""


class BabyWork(PendingWork):
    """An operation in a child process.

    Args:
        fail_group: fails the whole process group, and with it this operation.
        operation: name for errors.
        call: the tensors in shared memory; None: the operation has none.
        tensors: result of the operation.
        limit: timeout of the operation.
    """

    def __init__(
        self,
        fail_group: Callable[[Exception], None],
        operation: str,
        call: PackedCall | None,
        tensors: Any,
        limit: timedelta,
    ) -> None:
        super().__init__(tensors, _devices(tensors))
        self._fail_group = fail_group
        self._operation = operation
        self._call = call
        self._limit = limit
        self.segment = None if call is None else call.segment
        self.deadline = time.monotonic() + limit.total_seconds() + GRACE_SECONDS
        """On ``time.monotonic``. The child has reported the end of the operation by then."""

    def _seconds(self, timeout: timedelta) -> float:
        seconds = timeout.total_seconds() if timeout > timedelta(0) else self.deadline - time.monotonic()
        return max(0.0, seconds)

    def _time_out(self, timeout: timedelta) -> None:
        self._limit = timeout or self._limit
        self._fail_group(self.timeout_error())
        self._over.wait()  # `fail` ends every operation in flight

    def timeout_error(self) -> ProcessGroupTimeoutError:
        return timed_out(self._operation, self._limit)

    def copy_results(self) -> None:
        """Copy what the child has written into the caller's tensors."""
        if self._call is not None:
            self._call.copy_results()

    def end(self, error: Exception | None) -> None:
        """Complete the operation. Call it once."""
        self._call = None
        self._end(None if error is None else self.error_of(error))

    def error_of(self, error: Exception) -> Exception:
        """Return an error of this operation: ``error`` may be that of the whole connection."""
        if not isinstance(error, ProcessGroupError):
            return error  # an invalid call
        text = str(error)
        if self._operation == "configure":
            aborted = isinstance(error, ProcessGroupAbortedError)
            return type(error)(f"configure was aborted: {text}" if aborted else text)
        return type(error)(text if text.startswith(self._operation) else f"{self._operation} failed: {text}")


def _devices(tensors: Any) -> list[int | str | torch.device]:
    flat = tensors if isinstance(tensors, list) else [tensors]
    return list({one.device for one in flat if isinstance(one, torch.Tensor) and one.device.type == "cuda"})
