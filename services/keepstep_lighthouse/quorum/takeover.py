"""Unknowns about the stored quorum after a change of leader. Pure.

* Which members are alive. Until all have reconnected or the grace is over, no group is judged and no quorum is formed.
* Which members hold an answer of the previous lighthouse. If one member holds the answer of a step for which another
  still asks, that lighthouse died while it announced, and the holders wait for a peer that will never connect.
* Whether the previous lighthouse, if it was deposed but may be alive (*fenced*), still confirms the quorum. It cannot
  once a member has the new epoch, or its lease is over.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_mesh.protocol.messages import RoundBroken


class Takeover:
    def __init__(self, job: JobState, now: float) -> None:
        self._job = job
        self.until: float | None = None
        """End of the grace, monotonic seconds; None: no grace, or it is over."""
        self.judged_from = now
        """No group is judged before this time."""
        self.interrupted = False
        """Until a quorum forms, groups may have asked the previous lighthouse first: their requests have less time."""
        self.absent: set[str] = set()
        """Members that have not reconnected; empty during a grace: the members are unknown."""
        self._began = 0.0
        self._fenced_until = 0.0
        self._holding: dict[str, Group] = {}
        self._held_step = -1
        """The highest step of which a member holds an answer of the previous lighthouse."""
        self._lowest_asked: int | None = None

    # ---- the grace

    def wait(self, members: Iterable[str], now: float, fenced_until: float = 0.0) -> None:
        """Wait for ``members``, and for the end of the fence."""
        self.absent = set(members)
        self._began, self.interrupted = now, True
        self._fenced_until = max(fenced_until, self._fenced_until)
        self.change_grace()

    def change_grace(self) -> None:
        """Take the length of the grace from the policy, measured from its beginning. The fence does not change."""
        self.until = max(self._began + self._grace, self._fenced_until)

    def heard(self, group: Group, now: float) -> None:
        """A group sent a frame during the grace, so it has the new epoch. A member thereby ends the fence."""
        if self._fenced_until > 0.0 and group.member:
            self._fenced_until = 0.0
            self.until = max(now, self._began + self._grace)
            self._end_if_all_came(now)

    def no_longer_absent(self, replica_id: str, now: float) -> None:
        """The member reconnected, or is lost."""
        self.absent.discard(replica_id)
        self._end_if_all_came(now)

    def end_grace(self, now: float) -> None:
        """Judge silent and suspect groups from the next tick on, and measure the join timeout from now."""
        self.absent.clear()
        self.until = None
        self._fenced_until = 0.0
        self.judged_from = now
        self._job.groups.clock_starts(now)

    @property
    def _grace(self) -> float:
        policy = self._job.record.policy
        return policy.heartbeat_timeout if policy.takeover_grace is None else policy.takeover_grace

    def _end_if_all_came(self, now: float) -> None:
        """End the grace if no member is absent, unless one of them still has to send a frame."""
        if self.until is not None and not self.absent and not self._fenced_until > 0.0:
            self.end_grace(now)

    # ---- answers of the previous lighthouse

    def holds(self, group: Group, step: int) -> None:
        """A member reconnected with an answer of the previous lighthouse."""
        self._holding[group.replica_id] = group
        self._held_step = max(self._held_step, step)
        self._tell_stranded()

    def asks(self, group: Group, step: int) -> None:
        """A member asks, so it holds no answer."""
        self._holding.pop(group.replica_id, None)
        if self._lowest_asked is None or step < self._lowest_asked:
            self._lowest_asked = step
        self._tell_stranded()

    def is_gone(self, group: Group) -> None:
        self._holding.pop(group.replica_id, None)

    def forget_answers(self) -> None:
        """Every holder of an older answer has been notified, or has asked for a new one."""
        self._holding.clear()
        self._lowest_asked = None

    def quorum_formed(self) -> None:
        """The first quorum of this lighthouse has formed."""
        self.forget_answers()
        self.interrupted = False

    def _tell_stranded(self) -> None:
        """Send ``RoundBroken`` to members with an answer of the previous lighthouse that other members never got."""
        if self._lowest_asked is None or self._lowest_asked > self._held_step:
            return
        sessions = tuple([one.session for one in self._holding.values() if one.session is not None])
        self._holding.clear()
        if sessions:
            reason = f"the previous lighthouse answered step {self._held_step} to some members only"
            self._job.tell_all(sessions, RoundBroken(self._job.record.quorum_id, reason))
            self._job.log("round_broken", "", reason=reason)

    # ---- invariants

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        assert not self.absent & set(self._job.groups.by_id), "a group that is there counts as absent"
        assert not self.absent or self.until is not None, "absent groups are waited for without an end"
