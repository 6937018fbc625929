"""The log of a server of HTTP: malformed requests are one line a minute, without a traceback."""

from __future__ import annotations

import logging
import time

from aiohttp.http_exceptions import HttpProcessingError

from keepstep_mesh.config.log_limiter import LogLimiter


class _MalformedRequests(logging.Filter):
    """aiohttp logs each with a traceback: a port scanner would fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._limiter = LogLimiter()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        suppressed = self._limiter.take(time.monotonic())
        if suppressed is None:
            return False
        sender = record.args[0] if isinstance(record.args, tuple) and record.args else "unknown"
        reason = " ".join(error.message.split())[:200]
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        record.msg = "malformed request from %s: %s; requests like this that were not logged since the last line: %d"
        record.args = (sender, reason, suppressed)
        return True


server_log = logging.getLogger("keepstep.http")
"""Logger for servers of aiohttp."""
server_log.addFilter(_MalformedRequests())
