"""Requests of a session that have no answer yet: their futures and their deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from keepstep.session.alarm import Alarm

ANSWER_MARGIN = 0.25
"""Time after the deadline of a request in which a connected server may still answer with a reason."""


@dataclass(slots=True)
class _Open:
    future: asyncio.Future[Any]
    deadline: float
    late: Callable[[], str]
    given_up: Callable[[Any], None] | None


class OpenRequests:
    """The requests by their keys. One alarm ends all that are late, so a request needs no timer of its own.

    Args:
        is_connected: whether a server is there that may answer within ``ANSWER_MARGIN``.
    """

    def __init__(self, is_connected: Callable[[], bool]) -> None:
        self._is_connected = is_connected
        self._open: dict[Hashable, _Open] = {}
        self._alarm = Alarm(self._on_alarm)

    def open(
        self,
        key: Hashable,
        deadline: float,
        late: Callable[[], str],
        given_up: Callable[[Any], None] | None = None,
    ) -> asyncio.Future[Any]:
        """Return the future of the answer. Cancel it to withdraw the request.

        Args:
            key: of ``answer`` and ``fail``.
            deadline: time of the event loop at which the future raises ``TimeoutError``.
            late: returns the text of that error.
            given_up: called with the key when the request ends without an answer: cancelled, late, or ``fail_all``.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._on_done)
        self._open[key] = _Open(future, deadline, late, given_up)
        self._alarm.set_by(deadline)
        return future

    def any_open(self) -> bool:
        """Return whether a request is open, and note first which ones were cancelled in this iteration of the loop."""
        for one in tuple(self._open.values()):
            self._on_done(one.future)
        return bool(self._open)

    def deadline(self, key: Hashable) -> float | None:
        """Return the deadline of a request; None: it is not open."""
        one = self._open.get(key)
        return None if one is None else one.deadline

    def answer(self, key: Hashable, value: Any) -> None:
        """Complete a request, if it is open."""
        one = self._open.pop(key, None)
        if one is None:
            return
        if one.future.cancelled():  # asyncio calls ``_on_done`` only in the next iteration of the loop
            self._give_up(key, one)
        else:
            one.future.remove_done_callback(self._on_done)  # it is for cancellations
            one.future.set_result(value)

    def fail(self, key: Hashable, error: Exception) -> None:
        """Fail a request, if it is open."""
        one = self._open.pop(key, None)
        if one is not None and not one.future.done():
            one.future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """Fail all open requests."""
        self._alarm.set(None)
        for key in tuple(self._open):
            self._end(key, error)

    def _end(self, key: Hashable, error: Exception) -> None:
        one = self._open.pop(key)
        self._give_up(key, one)
        if not one.future.done():
            one.future.set_exception(error)

    @staticmethod
    def _give_up(key: Hashable, one: _Open) -> None:
        if one.given_up is not None:
            one.given_up(key)

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            for key, one in tuple(self._open.items()):
                if one.future is future:
                    del self._open[key]
                    self._give_up(key, one)

    def _on_alarm(self) -> None:
        now = asyncio.get_running_loop().time()
        margin = ANSWER_MARGIN if self._is_connected() else 0.0
        for key, one in tuple(self._open.items()):
            if now >= one.deadline + margin:
                self._end(key, TimeoutError(one.late()))
        self._alarm.set(min((one.deadline + margin for one in self._open.values()), default=None))
