"""The queue of the readers of a snapshot: decides which readers are sent bytes now. Pure: time is an argument.

The rules:

* ``READERS_AT_ONCE`` readers have a turn at a time. With more, each gets so small a part of the uplink that all of them
  run out of time together, and no reader has chunks early that it could pass on.
* The queue is first in, first out. A reader has a turn while any of its requests is answered; between two requests the
  next reader may begin, so the uplink is never idle.
* A reader that read nothing for ``SLOW_JOINER_SECONDS`` keeps its turn, but no longer counts against the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

READERS_AT_ONCE = 2
SLOW_JOINER_SECONDS = 2.0


@dataclass(slots=True)
class _Reader:
    waiting: int = 0
    """Number of its requests that wait."""
    answered: int = 0
    """Number of its requests that are being answered."""
    progress_at: float = 0.0
    """When it last read a part of an answer, or its turn began."""


class Admission:
    """The queue.

    For each request of a reader, call ``wait``, then ``begin`` until it returns True, then ``end``. Call ``give_up``
    for a request that ends before its turn.
    """

    def __init__(self, at_once: int = READERS_AT_ONCE) -> None:
        self._at_once = at_once
        self._readers: dict[str, _Reader] = {}
        """In the order of arrival."""

    def enter(self, reader: str) -> None:
        """Add ``reader`` to the end of the queue."""
        self._readers[reader] = _Reader()

    def leave(self, reader: str) -> None:
        """Remove ``reader`` from the queue."""
        self._readers.pop(reader, None)

    def wait(self, reader: str) -> None:
        """Add a request of ``reader``."""
        self._readers[reader].waiting += 1

    def give_up(self, reader: str) -> None:
        """Remove a waiting request of ``reader``."""
        if (one := self._readers.get(reader)) is not None:
            one.waiting -= 1

    def begin(self, reader: str, now: float) -> bool:
        """Begin to answer a waiting request of ``reader``, and return True, if the reader has a turn."""
        one = self._readers[reader]
        if not one.answered:
            if self.ahead(reader) >= self._at_once - self._working(now):
                return False
            one.progress_at = now
        one.waiting -= 1
        one.answered += 1
        return True

    def record_progress(self, reader: str, now: float) -> None:
        """Record that ``reader`` read a part of an answer."""
        if (one := self._readers.get(reader)) is not None:
            one.progress_at = now

    def end(self, reader: str) -> None:
        """End the answer to a request of ``reader``."""
        if (one := self._readers.get(reader)) is not None:
            one.answered -= 1

    def ahead(self, reader: str) -> int:
        """Return the number of readers without a turn that wait ahead of ``reader``."""
        ahead = 0
        for name, one in self._readers.items():
            if name == reader:
                break
            ahead += one.waiting > 0 and not one.answered
        return ahead

    def _working(self, now: float) -> int:
        return sum(one.answered > 0 and now - one.progress_at < SLOW_JOINER_SECONDS for one in self._readers.values())
