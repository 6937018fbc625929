"""Sections and progress of the training thread of one Manager."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Position of a rank in its training loop."""

    step: int = 0
    """Steps that the group has committed."""
    collectives: int = 0
    """Collectives over the groups that began in the open step."""
    in_flight: str = ""
    """The first of them that has not ended; empty: all have."""


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    began: float
    limit: float
    """Seconds."""


class Activity:
    """Read on the event-loop thread; the training thread writes it. Made on the training thread."""

    def __init__(self) -> None:
        self.training_thread = threading.get_ident()
        self.native_id = threading.get_native_id()
        self.progress: Callable[[], Progress] = Progress
        """Replaced by the part that knows the open step."""
        self.commits = 0
        """Steps that this process has committed."""
        self._sections: list[Section] = []

    @contextmanager
    def section(self, name: str, limit: float) -> Iterator[None]:
        """Declare that the thread is in a part of the script that may take ``limit`` seconds. ValueError: it is not
        positive.
        """
        if not limit > 0:
            raise ValueError(f"section {name!r} has the limit {limit:g} s; pass one that is longer than 0")
        section = Section(name, time.monotonic(), limit)
        self._sections.append(section)
        try:
            yield
        finally:
            self._sections.remove(section)

    @property
    def current(self) -> Section | None:
        """The innermost open section."""
        return self._sections[-1] if self._sections else None
