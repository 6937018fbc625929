"""Unknowns about the stored quorum after a change of leader.

* Which members are alive. Until all have reconnected or the grace is over, no group is judged and no quorum is formed.
* Which members hold an answer of the previous lighthouse. If one member holds the answer of a step for which another
  still asks, that lighthouse died while it announced, and the holders wait for a peer that will never connect.
* Whether the previous lighthouse, if it was deposed but may be alive (*fenced*), still confirms the quorum. It cannot
  once a member has the new epoch, or its lease is over.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep_lighthouse.quorum.groups.group import Group


class Takeover:
    """``until``: end of the grace, monotonic seconds; None: no grace, or it is over."""

    def __init__(self) -> None:
        self.until: float | None = None
        self._began = 0.0
        self._grace = 0.0
        self._fenced_until = 0.0
        self.absent: set[str] = set()
        """Members that have not reconnected; empty during a grace: the members are unknown."""
        self._holding: dict[str, Group] = {}
        self.held_step = -1
        """The highest step of which a member holds an answer of the previous lighthouse."""
        self._lowest_asked: int | None = None
        self.interrupted = False
        """Until a quorum forms, groups may have asked the previous lighthouse first: their requests have less time."""

    def wait(self, members: Iterable[str], now: float, grace: float, fenced_until: float = 0.0) -> None:
        self.absent = set(members)
        self._began, self._grace, self.interrupted = now, grace, True
        self._fenced_until = max(fenced_until, self._fenced_until)
        self.until = max(now + grace, self._fenced_until)

    @property
    def fenced(self) -> bool:
        return self.until is not None and self._fenced_until > 0.0

    def accepted(self, now: float) -> None:
        """A member of the quorum has the new epoch."""
        self._fenced_until = 0.0
        self.until = max(now, self._began + self._grace)

    def change_grace(self, grace: float) -> None:
        """Set the length of the current grace, measured from its beginning. The fence does not change."""
        self._grace = grace
        self.until = max(self._began + grace, self._fenced_until)

    def end_grace(self) -> None:
        self.absent.clear()
        self.until = None
        self._fenced_until = 0.0

    def forget_answers(self) -> None:
        """Every holder of an older answer has been notified, or has asked for a new one."""
        self._holding.clear()
        self._lowest_asked = None

    def holds(self, group: Group, step: int) -> None:
        """A member reconnected with an answer of the previous lighthouse."""
        self._holding[group.replica_id] = group
        self.held_step = max(self.held_step, step)

    def asks(self, group: Group, step: int) -> None:
        """A member asks, so it holds no answer."""
        self._holding.pop(group.replica_id, None)
        if self._lowest_asked is None or step < self._lowest_asked:
            self._lowest_asked = step

    def is_gone(self, group: Group) -> None:
        self._holding.pop(group.replica_id, None)

    def take_stranded(self) -> list[Group]:
        """Return members that hold an answer for whose step another member asks, each of them once."""
        if self._lowest_asked is None or self._lowest_asked > self.held_step:
            return []
        stranded = list(self._holding.values())
        self._holding.clear()
        return stranded
