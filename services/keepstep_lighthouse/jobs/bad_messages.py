"""Count the sessions that broke the protocol; log some of them."""

from __future__ import annotations

import time

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger

log = get_logger("keepstep.lighthouse")


class BadMessages:
    """Counts the sessions that broke the protocol, and logs some of them."""

    def __init__(self) -> None:
        self.total = 0
        self._logged = LogLimiter(seconds=1.0)  # of all jobs together: a client can invent any number of job names

    def add(self, job: str, replica_id: str, reason: str) -> None:
        self.total += 1
        if self._logged.allows(time.monotonic()):
            log.warning("bad message", job=job, replica_id=replica_id, reason=reason, bad_messages=self.total)
