"""How much of the network healing may take from training. Pure: time is an argument."""

from __future__ import annotations

import threading

BURST_SECONDS = 0.1


class RateLimiter:
    """``bytes_per_second``: that may leave; None: no limit. Any thread may ask."""

    def __init__(self, bytes_per_second: float | None) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"an uplink of {bytes_per_second} bytes a second is none; leave it out for no limit")
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    @property
    def limited(self) -> bool:
        return self._rate is not None

    def delay(self, size: int, now: float) -> float:
        """Seconds to wait before ``size`` bytes are sent; they count as sent from then on."""
        if self._rate is None:
            return 0.0
        with self._lock:
            begin = max(self._free_at, now - BURST_SECONDS)
            self._free_at = begin + size / self._rate
        return max(0.0, begin - now)
