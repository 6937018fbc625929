"""Connections that a blocking client opens when it first needs them, one for each key."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_client import RankClient
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.session.lighthouse_session import LighthouseSession
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError

log = get_logger("keepstep.coordination")

CLOSE_LEAVE_SECONDS = 1.0
"""Time limit of a graceful leave."""

K = TypeVar("K", bound=Hashable)
C = TypeVar("C", LighthouseSession, RankClient)


class Connections(Generic[K, C]):
    """One connection for each key, opened on first use. Callers that wait for one key do not block those of another.

    Args:
        loop_thread: the event loop on which connections live.
        open_one: opens the connection of a key.
    """

    def __init__(self, loop_thread: LoopThread, open_one: Callable[[K], Coroutine[Any, Any, C]]) -> None:
        self._loop_thread = loop_thread
        self._open_one: Callable[[K], Coroutine[Any, Any, C]] = open_one
        self._lock = threading.Lock()
        self._opened: dict[K, concurrent.futures.Future[C]] = {}
        self._ready: dict[K, C] = {}
        """Those of ``_opened`` that ``get`` has returned."""
        self._closed = ""
        """Why no connection is opened any more; empty: it is."""

    def get(self, key: K, timeout: float) -> C:
        """Return the connection of ``key``. Raise what ``open_one`` raises; the next call then tries again."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._closed}: create another client")
            if (ready := self._ready.get(key)) is not None:
                return ready
            one = self._opened.get(key)
            if one is None or (one.done() and (one.cancelled() or one.exception() is not None)):
                one = self._opened[key] = self._loop_thread.spawn(self._open_one(key))
        connection = one.result(timeout)
        with self._lock:
            if self._opened.get(key) is one:
                self._ready[key] = connection
        return connection

    def forget(self, key: K) -> None:
        """Let the next ``get`` of ``key`` open another connection. The caller closes this one."""
        with self._lock:
            self._opened.pop(key, None)
            self._ready.pop(key, None)

    def leave_all(self, reason: str) -> bool:
        """Leave and close every connection, for good; cancel those that are still being opened.

        Return False if that was done before.
        """
        with self._lock:
            if self._closed:
                return False
            opened, self._opened, self._ready, self._closed = self._opened, {}, {}, reason
        for one in opened.values():
            if not one.cancel() and one.exception() is None:
                leave(self._loop_thread, one.result(), reason)
        return True


def leave(loop_thread: LoopThread, one: LighthouseSession | GroupServer | RankClient, reason: str) -> None:
    """Leave gracefully if the peer confirms within ``CLOSE_LEAVE_SECONDS``; close the connection in any case."""
    try:
        loop_thread.call(one.leave(reason, CLOSE_LEAVE_SECONDS), CLOSE_LEAVE_SECONDS + CALL_MARGIN_SECONDS)
    except (TimeoutError, KeepstepError, OSError) as error:
        log.info("closed without a graceful leave", reason=f"{type(error).__name__}: {error}")
    loop_thread.call(one.close(), CALL_MARGIN_SECONDS)
