"""Choose the next lighthouse to try. Pure: the random draw and times are arguments.

The first pass over the addresses does not wait, so that a broken connection is restored within the reconnect grace;
later passes back off. After a connection that lasted a while breaks, its address is tried first. The address of a
lighthouse that fell silent is tried last, with a short limit that grows, even if another lighthouse still names it
the leader, because a standby has probably taken over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from keepstep_mesh.net.backoff import Backoff

PASS_BACKOFF = Backoff(first=0.02, most=1.0)
"""Delay before the second and each further pass over the addresses."""
SESSION_CONNECT_SECONDS = 5.0
"""Limit of TCP, TLS and the WebSocket upgrade of one address."""
SILENT_CONNECT = Backoff(first=0.5, most=SESSION_CONNECT_SECONDS)
"""The same after a lighthouse fell silent, by the number of attempts that got no answer."""
SETTLED_SECONDS = 1.0
"""After a connection that lasted this long, the passes start again without delay."""


class Addresses:
    """Chooses the next lighthouse to try, and the delay before it."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._all = tuple(dict.fromkeys(addresses))
        if not self._all:
            raise ValueError("no lighthouse address: set KEEPSTEP_LIGHTHOUSE or pass lighthouse_addr")
        self._left = deque(self._all)
        self._passes = 0
        self._leader = ""
        self._followed: set[str] = set()
        self._silent: Counter[str] = Counter()
        """Attempts in a row without an answer, for each address that gave none to the last one."""

    def next(self, chance: float) -> tuple[float, str]:
        """Return (delay in seconds, address). ``chance`` in [0, 1) spreads clients that lost the same lighthouse."""
        if self._leader:
            leader, self._leader = self._leader, ""
            return 0.0, leader
        if self._left:
            return 0.0, self._left.popleft()
        self._start_pass()
        self._passes += 1
        return PASS_BACKOFF.seconds(self._passes, chance), self._left.popleft()

    def connect_seconds(self, address: str) -> float:
        """Return the limit of a connection to ``address``."""
        failures = self._silent[address]
        return SILENT_CONNECT.seconds(failures) if failures else SESSION_CONNECT_SECONDS

    def timed_out(self, address: str) -> None:
        """Note that ``address`` did not answer within ``connect_seconds``."""
        self._silent[address] += 1

    def follow(self, leader: str) -> None:
        """Try ``leader`` next, as a lighthouse advised; once in a pass, and last if it fell silent."""
        if not leader or leader in self._followed:
            return
        self._followed.add(leader)
        if leader not in self._silent:
            self._leader = leader
        elif leader not in (*self._all, *self._left):
            self._left.append(leader)

    def lost(self, address: str, lasted_seconds: float, *, silent: bool = False) -> None:
        """Note that the session with ``address`` ended. ``silent``: because the lighthouse fell silent."""
        if silent:
            self._silent[address] = 1
        else:
            self._silent.pop(address, None)
        if lasted_seconds < SETTLED_SECONDS:
            return
        self._start_pass()
        self._passes = 0
        if address in self._left:
            self._left.remove(address)
        if silent:
            self._left.append(address)
        else:
            self._left.appendleft(address)

    def _start_pass(self) -> None:
        self._left = deque(sorted(self._all, key=self._silent.__contains__))
        self._followed.clear()
