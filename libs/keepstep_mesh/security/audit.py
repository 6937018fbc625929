"""Who asked for what: every order is logged with its outcome, every refusal too, but no flood of them."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_mesh.security.tokens import Role

REFUSAL_SECONDS = 10.0
"""One line about one address in that time; the rest is counted in the next."""
MAX_ADDRESSES = 1000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end. ``role`` and ``name`` are its token's, None and empty when it has no good one.

    ``certificate``: the common name (else the first alternative name) of its certificate, with mutual TLS.
    """

    remote: str
    role: Role | None = None
    name: str = ""
    certificate: str = ""

    def __str__(self) -> str:
        """``admin alice (certificate ops.example) at 10.0.0.7``."""
        words = [self.role.value if self.role else "nobody", self.name]
        words += [f"(certificate {self.certificate})" if self.certificate else "", "at", self.remote]
        return " ".join(word for word in words if word)


class LogLimiter:
    """Which of many equal lines are written: one for each key in ``seconds``."""

    def __init__(self, seconds: float = REFUSAL_SECONDS, max_keys: int = MAX_ADDRESSES) -> None:
        self._seconds = seconds
        self._max_keys = max_keys
        self._written: dict[str, tuple[float, int]] = {}
        """When a line was written last, and how many were left out since; the oldest first."""

    def take(self, key: str, now: float) -> int | None:
        """How many lines were left out since the last one; None: leave this one out too."""
        when, left_out = self._written.get(key, (None, 0))
        if when is not None and now - when < self._seconds:
            self._written[key] = when, left_out + 1
            return None
        self._written.pop(key, None)
        if len(self._written) >= self._max_keys:
            del self._written[next(iter(self._written))]
        self._written[key] = now, 0
        return left_out
