"""Which readers of a snapshot are sent bytes now, and which wait. Pure: time is an argument.

The rules:

* ``READERS_AT_ONCE`` readers have a turn at a time. With more, each gets so small a part of the uplink that all of them
  run out of time together, and no reader has chunks early that it could pass on.
* The reader that came first goes first. It has a turn while any of its requests is answered; between two of them the
  next reader may come in, so the uplink is never idle.
* A reader that took nothing for ``SLOW_JOINER_SECONDS`` keeps its turn, but others no longer wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

READERS_AT_ONCE = 2
SLOW_JOINER_SECONDS = 2.0


@dataclass(slots=True)
class _Reader:
    waiting: int = 0
    """Its requests that wait."""
    answered: int = 0
    """Its requests that are being answered."""
    took_at: float = 0.0
    """When it last took a part, or its turn began."""


class Admission:
    """Each request first calls ``wait``, then ``begin`` until that is true, then ``end``; or ``give_up`` instead."""

    def __init__(self, at_once: int = READERS_AT_ONCE) -> None:
        self._at_once = at_once
        self._readers: dict[str, _Reader] = {}
        """In the order in which they came."""

    def enter(self, reader: str) -> None:
        """Give it a place in the queue, until ``leave``."""
        self._readers[reader] = _Reader()

    def leave(self, reader: str) -> None:
        self._readers.pop(reader, None)

    def wait(self, reader: str) -> None:
        self._readers[reader].waiting += 1

    def give_up(self, reader: str) -> None:
        if (one := self._readers.get(reader)) is not None:
            one.waiting -= 1

    def begin(self, reader: str, now: float) -> bool:
        """Begin to answer one of its waiting requests, if it has a turn. Returns whether it has."""
        one = self._readers[reader]
        if not one.answered:
            if self.ahead(reader) >= self._at_once - self._working(now):
                return False
            one.took_at = now
        one.waiting -= 1
        one.answered += 1
        return True

    def took(self, reader: str, now: float) -> None:
        """Note that it read a part of an answer."""
        if (one := self._readers.get(reader)) is not None:
            one.took_at = now

    def end(self, reader: str) -> None:
        if (one := self._readers.get(reader)) is not None:
            one.answered -= 1

    def ahead(self, reader: str) -> int:
        """Readers without a turn that wait and came before this one."""
        ahead = 0
        for name, one in self._readers.items():
            if name == reader:
                break
            ahead += one.waiting > 0 and not one.answered
        return ahead

    def _working(self, now: float) -> int:
        return sum(one.answered > 0 and now - one.took_at < SLOW_JOINER_SECONDS for one in self._readers.values())
