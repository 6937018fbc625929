"""Receive the state of another group in the background, while this one follows its steps."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from keepstep.group.group_peers import checkpoint_metadata
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS
from keepstep.state.errors import TransferError
from keepstep.step.context import StepContext
from keepstep.transfer.exchange import Progress
from keepstep_mesh.threads.starting import Thread

LIMIT = timedelta(hours=6)
"""Of a transfer that makes progress. The memory for gradients is used up much earlier."""
END_SECONDS = 10.0
"""Limit of the wait for the thread to end, after its transfer was aborted."""


class BackgroundReceive:
    """One transfer, on a thread of its own. The tensors that it receives are new, and on the CPU.

    Args:
        context: of this process. Its transport must allow ``receives_in_background``.
        plan: of a quorum in which this group heals. The source is that of the plan.
        progress: called with the bytes received so far, and in all.
    """

    def __init__(self, context: StepContext, plan: QuorumPlan, progress: Progress) -> None:
        if plan.source is None:
            raise ValueError("the plan has no source to receive from")
        member = plan.members[plan.source]
        self.source = member.replica_id
        self.state: dict[str, Any] | None = None
        """The received state; None: not yet, or the transfer failed."""
        self.error: Exception | None = None
        """Why the transfer failed."""
        self.moved = (0, 0)
        """Bytes received so far, and in all; (0, 0): it has not begun."""
        self._context = context
        self._plan, self._address, self._source = plan, member.info.address, plan.source
        self._report = progress
        self._cancelled = ""
        self._ended = threading.Event()
        self._thread = Thread(target=self._run, name="keepstep-catch-up", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the transfer has ended, with the state or with an error."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end. Return whether the transfer has ended."""
        return self._ended.wait(seconds)

    def cancel(self, reason: str) -> None:
        """End the transfer, and wait ``END_SECONDS`` at most for its thread."""
        self._cancelled = self._cancelled or reason
        if not self.ended:
            self._context.transport.abort_receive(reason)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            self.state = self._receive()
        except Exception as error:  # noqa: BLE001  the training thread reports it
            self.error = error
        finally:
            self._ended.set()

    def _receive(self) -> dict[str, Any]:
        context, seconds = self._context, self._context.timeout.total_seconds()
        request = checkpoint_metadata(self._address, context.settings.rank, context.settings.token, seconds)
        metadata = context.loop_thread.call(request, seconds + CALL_MARGIN_SECONDS)
        self._check_cancelled()
        return context.transport.recv_checkpoint(
            self._source, metadata, self._plan.max_step, context.timeout, progress=self._progress, limit=LIMIT
        )

    def _progress(self, done: int, total: int) -> None:
        self.moved = done, total
        self._report(done, total)
        self._check_cancelled()

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise TransferError(f"receiving in the background was ended: {self._cancelled}", torn=False)
