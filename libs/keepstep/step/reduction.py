"""An all-reduce that the script asks for, and the Work that it gets. It reports an error, and never raises it."""

from __future__ import annotations

import threading
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

    Without ``ended`` and a call of ``get_future`` the thread that waits ends it: a callback would run Python in a
    thread of the process group, beside the training thread.

    Args:
        work: the collective of the process group; None: no collective was started.
        value: the value of the future, whether the collective succeeds or not.
        finish: called once after success, before the future completes.
        report: called with the error of the collective.
        write_back: for the Manager to call on the training thread in ``should_commit``, after all passes, if the
            collective succeeded.
        ok: what ``wait`` returns when ``work`` is None.
        ended: called as soon as the collective is over, also after an error.
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
        self._work = work
        self._value = value
        self._ok = ok
        self._finish, self._ended = finish, ended
        self._report = report
        self.write_back = write_back
        self._future: Future[Any] | None = None
        self._settling = threading.Lock()
        self._asking = threading.Lock()
        if work is not None and (ended is not None or not getattr(work, "ends_in_wait", False)):
            self._asked_future()

    def _settle(self, error: Exception | None) -> None:
        """End the collective, once, after its end in the process group. ``error``: of that; None: it succeeded."""
        with self._settling:
            if self._work is None:
                return
            try:
                try:
                    if error is not None:
                        raise error
                    self._finish()
                except Exception as failure:  # noqa: BLE001  whatever the error is, the step does not commit
                    self._ok = False
                    self._report(failure)
                if self._ended is not None:
                    self._ended()
            finally:
                self._work, self._finish = None, _nothing  # last: a thread that waits goes on without the lock then

    def _settled(self, source: Future[Any]) -> object:
        self._settle(_error_of(source.value))
        return self._value

    def _asked_future(self) -> Future[Any]:
        with self._asking:
            if self._future is None:
                work = self._work
                if work is None:
                    self._future = Future()
                    self._future.set_result(self._value)
                else:
                    self._future = work.get_future().then(self._settled)
            return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  the process group keeps the deadline
        """Wait for the collective, and return whether it succeeded."""
        return self.ended() if self.finalize is None else self.finalize()

    def ended(self) -> bool:
        """Wait for this try of the collective, and return whether it succeeded."""
        try:
            if self._future is not None:
                self._future.wait()
            elif (work := self._work) is not None:
                self._settle(_error_of(work.wait))
        except Exception as error:  # noqa: BLE001  torch could not run the callback: no memory for it
            self._ok = False
            self._report(error)
        return self._ok

    @property
    def is_over(self) -> bool:
        """Whether the collective has ended, in the process group at least. Any thread."""
        if self._future is not None:
            return self._future.done()
        work = self._work
        return work is None or work.is_completed()

    def is_completed(self) -> bool:
        """Return whether the collective has ended; its result is there then."""
        done = self.is_over
        if done:
            self.wait()
        return done

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait(timeout)

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the tensor, and never with an exception."""
        if self.finalize is not None:
            self.finalize()
        return self._asked_future()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._value) if isinstance(self._value, (list, tuple)) else [self._value]  # type: ignore[list-item]


def _nothing() -> None:
    """Do nothing."""


def _error_of(wait: Callable[[], object]) -> Exception | None:
    try:
        wait()
    except Exception as error:  # noqa: BLE001  reported
        return error
    return None
