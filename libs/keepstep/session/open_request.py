"""The open quorum request of a session: its future, its deadline, and the messages about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keepstep.session import session_events
from keepstep.session.session_machine import SessionCore
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import Quorum
from keepstep_mesh.protocol.messages import CancelRequest, Closed, Denied, QuorumAnswer, QuorumRequest, ToLighthouse


class OpenRequest:
    """Holds at most one request, until it is answered, denied, cancelled, or overdue.

    Args:
        core: numbers requests and checks answers.
        send: sends a message to the lighthouse; drops it while disconnected.
    """

    def __init__(self, core: SessionCore, send: Callable[[ToLighthouse], None]) -> None:
        self._core = core
        self._send = send
        self._future: asyncio.Future[Quorum] | None = None
        self._deadline = 0.0

    @property
    def deadline(self) -> float | None:
        """Time of the event loop at which the open request ends; None: no request is open."""
        return None if self._future is None else self._deadline

    def open(self, request: QuorumRequest, deadline: float) -> asyncio.Future[Quorum]:
        """Open a request; ``send`` sends it. Cancel the future to withdraw the request."""
        if self._future is not None and self._future.cancelled():
            self._on_done(self._future)  # asyncio calls it only in the next iteration of the loop
        if self._future is not None:
            raise KeepstepError("a quorum request is already open; wait for it or cancel it")
        self._core.ask(request)
        self._deadline = deadline
        self._future = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(self._on_done)
        return self._future

    def send(self, now: float) -> None:
        """Send the open request on a connection that does not have it, with the time that is left."""
        request = self._core.to_send(max(1, round((self._deadline - now) * 1000)))
        if request is not None:
            self._send(request)

    def answered(self, answer: QuorumAnswer) -> None:
        """Complete the request that ``answer`` belongs to. Raises ``ProtocolError`` if the answer is invalid."""
        quorum = self._core.answered(answer)
        if quorum is not None:
            future, self._future = self._future, None
            if future is not None and not future.done():
                future.remove_done_callback(self._on_done)  # it is for cancellations
                future.set_result(quorum)

    def denied(self, denied: Denied) -> None:
        """Fail the request that was denied, if it is still open."""
        if self._core.withdraw(denied.request):
            self.fail(session_events.of_request(denied))

    def closed(self, closed: Closed) -> None:
        """End the final request: the groups have finished."""
        if self._core.withdraw(closed.request):
            self.fail(session_events.of_closed(closed))

    def fail(self, error: Exception) -> None:
        """Withdraw the open request, if any, and fail it with ``error``."""
        future, self._future = self._future, None
        if future is not None:
            self._withdraw()
            if not future.done():
                future.set_exception(error)

    def _on_done(self, future: asyncio.Future[Quorum]) -> None:
        if not future.cancelled():
            return
        self._core.finished_step()
        if self._future is future:
            self._future = None
            self._withdraw()

    def _withdraw(self) -> None:
        if self._core.withdraw(self._core.number):
            self._send(CancelRequest(self._core.number))
