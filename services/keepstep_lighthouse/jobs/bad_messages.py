"""Count the sessions that broke the protocol; log some of them."""

from __future__ import annotations

import time

from keepstep_mesh.config.logging import get_logger

LOGGED_BAD_MESSAGES = 10
"""Limit of log lines within ``LOGGED_SECONDS``; further messages are only counted."""
LOGGED_SECONDS = 10.0

log = get_logger("keepstep.lighthouse")


class BadMessages:
    """Counts the sessions that broke the protocol, and logs some of them."""

    def __init__(self) -> None:
        self.total = 0
        self._window = 0.0
        self._in_window = 0

    def add(self, job: str, replica_id: str, reason: str) -> None:
        self.total += 1
        now = time.monotonic()
        if now >= self._window + LOGGED_SECONDS:
            self._window, self._in_window = now, 0
        self._in_window += 1
        if self._in_window <= LOGGED_BAD_MESSAGES:
            log.warning("bad message", job=job, replica_id=replica_id, reason=reason, bad_messages=self.total)
