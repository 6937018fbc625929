"""What a lighthouse whose term just began does not know yet about the quorum it found in the store.

Who of its members lives: until all are back, or the grace is over, nobody is judged and no quorum is formed. And who
holds an answer of the lighthouse before: when one member holds a step's answer for which another still asks, that
lighthouse died while it announced, and those who hold the answer wait for a peer that will never come. And, where that
lighthouse was deposed and may be alive (*fenced*): whether it still confirms the quorum. It cannot once a member has
taken on the new epoch, or its lease is over.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep_lighthouse.quorum.group import Group


class Takeover:
    """``until``: end of the grace, monotonic seconds; None: there is no grace, or it is over."""

    def __init__(self) -> None:
        self.until: float | None = None
        self._began = 0.0
        self._grace = 0.0
        self._fenced_until = 0.0
        self.absent: set[str] = set()
        """Members that are not back; empty during a grace means that it is not known who was there."""
        self._holding: dict[str, Group] = {}
        self.held_step = -1
        """The highest step whose answer by the lighthouse before is held."""
        self._lowest_asked: int | None = None

    def wait(self, members: Iterable[str], now: float, grace: float, fenced_until: float = 0.0) -> None:
        self.absent = set(members)
        self._began, self._grace = now, grace
        self._fenced_until = max(fenced_until, self._fenced_until)
        self.until = max(now + grace, self._fenced_until)

    @property
    def fenced(self) -> bool:
        return self.until is not None and self._fenced_until > 0.0

    def accepted(self, now: float) -> None:
        """A member of the quorum has taken on the new epoch."""
        self._fenced_until = 0.0
        self.until = max(now, self._began + self._grace)

    def change_grace(self, grace: float) -> None:
        """While there is a grace: it is so long from its beginning. The fence stays as it is."""
        self._grace = grace
        self.until = max(self._began + grace, self._fenced_until)

    def end_grace(self) -> None:
        self.absent.clear()
        self.until = None
        self._fenced_until = 0.0

    def forget_answers(self) -> None:
        """Whoever held an older answer has been told that it is over, or has asked for a new one."""
        self._holding.clear()
        self._lowest_asked = None

    def holds(self, group: Group, step: int) -> None:
        """A member came back with an answer of the lighthouse before."""
        self._holding[group.replica_id] = group
        self.held_step = max(self.held_step, step)

    def asks(self, group: Group, step: int) -> None:
        """A member asks. It holds no answer, then."""
        self._holding.pop(group.replica_id, None)
        if self._lowest_asked is None or step < self._lowest_asked:
            self._lowest_asked = step

    def is_gone(self, group: Group) -> None:
        self._holding.pop(group.replica_id, None)

    def take_stranded(self) -> list[Group]:
        """The members that hold an answer for whose step another member asks. Each is named once."""
        if self._lowest_asked is None or self._lowest_asked > self.held_step:
            return []
        stranded = list(self._holding.values())
        self._holding.clear()
        return stranded
