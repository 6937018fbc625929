"""The election of the leader. Pure: events in, the next action out, time is an argument.

Rules:

* The leader's key in the store holds its record, under a lease. Taking it is one compare-and-swap that raises the
  epoch too; a takeover revokes the lease of the previous leader.
* A follower takes the key when it is missing; or, without waiting for the lease, as soon as its *established* link to
  the leader of that key breaks. A follower that never had a link to the leader waits for the lease.
* A leader renews after every third of the lease. It stops when nine tenths of the lease have passed by its own clock
  since it sent the last successful renewal, or as soon as it hears that another lighthouse has the key.
* A leader without sessions, while workers offer sessions to a follower, steps down and leaves the key to others for
  one lease.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from keepstep_lighthouse.store.contract import StoreError

TRY_AGAIN_SECONDS = 0.2
"""Pause after an attempt that the store did not carry out."""
OUTRUN_SECONDS = 0.02
"""Pause after an attempt that found another key or epoch."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Value of the leader's key. ``address``: where workers and other lighthouses reach it."""

    node: str
    address: str
    lease: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Leader:
        """Decode the value. Raise ``StoreError`` if it is invalid."""
        try:
            plain = json.loads(value)
            return cls(str(plain["node"]), str(plain["address"]), int(plain["lease"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"the leader's key holds {value[:200]!r}, which is not a leader; delete it") from error


@dataclass(frozen=True, slots=True)
class Take:
    """Try to lead, where ``expected`` is what the key holds now."""

    expected: bytes | None


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the lease and check that the key is still ours."""


@dataclass(frozen=True, slots=True)
class StepDown:
    reason: str


Action = Take | Renew | StepDown


class Election:
    """``lease``: seconds."""

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self.value: bytes | None = None
        """Last known value of the leader's key; valid while ``known``."""
        self.known = False
        self.mine: bytes | None = None
        """Our record while we lead."""
        self.until = 0.0
        """When this leader must stop unless a renewal succeeds first."""
        self._renew_at = 0.0
        self._linked: bytes | None = None
        self._broken: bytes | None = None
        """The leader whose established link broke."""
        self._not_before = 0.0

    @property
    def leading(self) -> bool:
        return self.mine is not None

    # ---- events

    def heard(self, value: bytes | None) -> None:
        """The store reported the value of the key."""
        self.value, self.known = value, True

    def linked(self, leader: bytes) -> None:
        """The link to this leader is established."""
        self._linked, self._broken = leader, None

    def link_broke(self, leader: bytes) -> None:
        if self._linked == leader:
            self._linked, self._broken = None, leader

    def took(self, record: bytes, sent_at: float) -> None:
        """The key is ours, by a lease granted no earlier than ``sent_at``."""
        self.mine = self.value = record
        self.known = True
        self._linked = self._broken = None
        self.renewed(sent_at)

    def not_taken(self, now: float, *, outrun: bool) -> None:
        """``outrun``: the key or the epoch had changed; otherwise the store did not carry it out."""
        pause = OUTRUN_SECONDS if outrun else TRY_AGAIN_SECONDS
        self._not_before = max(self._not_before, now + pause)

    def renewed(self, sent_at: float) -> None:
        self.until = sent_at + 0.9 * self.lease
        self._renew_at = sent_at + self.lease / 3

    def not_renewed(self, now: float) -> None:
        """The store did not answer; retry, because the lease still lasts."""
        self._renew_at = now + self.lease / 20

    def stepped_down(self, now: float, *, stand_back: bool = False) -> None:
        """``stand_back``: leave the key to others for one lease."""
        self.mine = None
        self.known = False  # until the store reports the key again
        if stand_back:
            self._not_before = now + self.lease

    # ---- what follows

    def action(self, now: float) -> Action | None:
        """Return what to do now. Report its outcome before the next call."""
        if self.mine is not None:
            if self.known and self.value != self.mine:
                return StepDown("another lighthouse took over" if self.value else "its key in the store is missing")
            if now >= self.until:
                return StepDown("its lease could not be renewed in time")
            return Renew() if now >= self._renew_at else None
        if not self.known or now < self._not_before:
            return None
        if self.value is None or self.value == self._broken:
            return Take(self.value)
        return None

    def deadline(self) -> float | None:
        """Return when to call ``action`` again if no event happens before."""
        if self.mine is not None:
            return min(self.until, self._renew_at)
        if self.known and (self.value is None or self.value == self._broken):
            return self._not_before
        return None
