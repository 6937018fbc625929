"""The processes that have the epoch of a term from this lighthouse. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict

MAX_LEFT = 20_000


class Welcomed:
    """All processes that are connected, and the ``MAX_LEFT`` of the others that left last.

    A process is ``(job, replica_id)``. It may have two connections for a while, if it connects again before the end of
    its old connection is noticed.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[str, str]] = {}
        """By number of the session."""
        self._connected: Counter[tuple[str, str]] = Counter()
        """Number of sessions of each process."""
        self._left: OrderedDict[tuple[str, str], None] = OrderedDict()
        """By the time at which they left."""

    def __contains__(self, process: tuple[str, str]) -> bool:
        return process in self._connected or process in self._left

    def begin(self, session: int, process: tuple[str, str]) -> None:
        self._sessions[session] = process
        self._connected[process] += 1
        self._left.pop(process, None)

    def epoch_raised(self) -> None:
        """Forget the processes that left, without the new epoch. Those that are connected get it with an answer."""
        self._left.clear()

    def end(self, session: int) -> None:
        """Ignore a session that did not begin in this term."""
        if (process := self._sessions.pop(session, None)) is None:
            return
        self._connected[process] -= 1
        if not self._connected[process]:
            del self._connected[process]
            self._left[process] = None
            if len(self._left) > MAX_LEFT:
                self._left.popitem(last=False)
