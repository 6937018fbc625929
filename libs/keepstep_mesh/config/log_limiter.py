"""Limit how often a log line is written. Pure: time is an argument."""

from __future__ import annotations


class LogLimiter:
    """Lets one line pass in ``seconds`` for each key. Of more than ``max_keys`` keys, the oldest are forgotten."""

    def __init__(self, seconds: float = 60.0, max_keys: int = 1) -> None:
        self._seconds = seconds
        self._max_keys = max_keys
        self._written: dict[str, tuple[float, int]] = {}
        """Time of the last line of each key and the number of lines suppressed since; the oldest first."""

    def take(self, now: float, key: str = "") -> int | None:
        """Return the number of lines suppressed since the last one, or None if this line must be suppressed too."""
        when, suppressed = self._written.get(key, (None, 0))
        if when is not None and now - when < self._seconds:
            self._written[key] = when, suppressed + 1
            return None
        self._written.pop(key, None)
        if len(self._written) >= self._max_keys:
            del self._written[next(iter(self._written))]
        self._written[key] = now, 0
        return suppressed

    def allows(self, now: float, key: str = "") -> bool:
        """Return whether the line may be written, for lines that do not name the number of suppressed ones."""
        return self.take(now, key) is not None

    def reset(self) -> None:
        """Let the next line of every key pass."""
        self._written.clear()
