"""Limits the bandwidth that healing takes from training. Pure: time is an argument."""

from __future__ import annotations

import threading

BURST_SECONDS = 0.1


class RateLimiter:
    """A limit for the bytes that leave this process. Safe to call from any thread.

    Args:
        bytes_per_second: the limit. None: no limit.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"uplink must be positive, not {bytes_per_second} bytes per second; None means no limit")
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    @property
    def limited(self) -> bool:
        return self._rate is not None

    def delay(self, size: int, now: float) -> float:
        """Reserve ``size`` bytes, and return the seconds to wait before they are sent."""
        if self._rate is None:
            return 0.0
        with self._lock:
            begin = max(self._free_at, now - BURST_SECONDS)
            self._free_at = begin + size / self._rate
        return max(0.0, begin - now)
