"""An all-reduce that the script asks for, and the Work that it gets. It reports an error, and never raises it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.futures import Future


@dataclass(frozen=True, slots=True)
class Reduction:
    """A tensor to reduce in place, and how."""

    tensor: torch.Tensor
    """Dense, of any shape."""
    op: ReduceOp | ReduceOp.RedOpType
    average: bool
    """Divide the sum by the number of groups that take part."""
    write_back: Callable[[], None] | None = None
    """Called by ``Collectives.finish``, if the collective succeeded."""
    quantize: bool = False
    """Send 8-bit values. The sum is computed in float32, so float16 does not overflow."""
    refill: Callable[[], None] | None = None
    """Fills ``tensor`` with this group's contribution again, for a retry under another quorum. None: a copy does."""


class ManagedWork(dist.Work):
    """One collective under a Manager.

    Args:
        work: the collective of the process group; None: no collective was started.
        value: the value of the future, whether the collective succeeds or not.
        finish: called once after success, before the future completes (the division of an average).
        report: called with the error of the collective.
        write_back: for the Manager to call on the training thread in ``should_commit``, after all passes, if the
            collective succeeded.
        ok: what ``wait`` returns when ``work`` is None.
        ended: called before the future completes, also after an error.
    """

    def __init__(
        self,
        work: dist.Work | None,
        value: object,
        finish: Callable[[], None] = lambda: None,
        report: Callable[[Exception], None] = lambda _: None,
        write_back: Callable[[], None] | None = None,
        ok: bool = True,
        ended: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.finalize: Callable[[], bool] | None = None
        """Called instead of a wait of the script, with ``retry_allreduce``. Returns what ``wait`` returns."""
        self._value = value
        self._ok = ok
        self._report = report
        self.write_back = write_back
        if work is None:
            self._future: Future[Any] = Future()
            self._future.set_result(value)
            return

        def settle(source: Future[Any]) -> object:
            try:
                source.value()
                finish()
            except Exception as error:  # noqa: BLE001  whatever the error is, the step does not commit
                self._ok = False
                report(error)
            if ended is not None:
                ended()
            return value

        self._future = work.get_future().then(settle)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  the process group keeps the deadline
        """Wait for the collective, and return whether it succeeded."""
        return self.ended() if self.finalize is None else self.finalize()

    def ended(self) -> bool:
        """Wait for this try of the collective, and return whether it succeeded."""
        try:
            self._future.wait()
        except Exception as error:  # noqa: BLE001  torch could not run the callback: no memory for it
            self._ok = False
            self._report(error)
        return self._ok

    def is_completed(self) -> bool:
        done = self._future.done()
        if done and self.finalize is not None:
            self.finalize()
        return done

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait(timeout)

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the tensor, and never with an exception."""
        if self.finalize is not None:
            self.finalize()
        return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._value) if isinstance(self._value, (list, tuple)) else [self._value]  # type: ignore[list-item]
