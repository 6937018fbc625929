"""Votes and polls of the ranks of this group."""

from __future__ import annotations

import contextlib

from keepstep.group.ranks.rank_link import RankLink
from keepstep.runtime.exits import GroupFailedExit
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.step.progress import GroupProgress
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.group_messages import RankVote

POLL_TIMEOUTS = 4
"""A poll waits so many times ``timeout``, because the other ranks may still be in their forward pass."""


class RankVotes:
    """The votes of this rank.

    Args:
        loop_thread: sends them.
        link: of this rank.
        progress: of the group.
        alone: whether the group has one rank.
        timeout: of the Manager, in seconds.
    """

    def __init__(
        self, loop_thread: LoopThread, link: RankLink, progress: GroupProgress, *, alone: bool, timeout: float
    ) -> None:
        self.alone = alone
        """Whether the group has one rank."""
        self._loop_thread = loop_thread
        self._link = link
        self._progress = progress
        self._timeout = timeout
        self._attempt = 0
        """``QuorumPlan.attempt`` of the last step."""
        self._polls = 0
        """Number of polls since then."""

    def ended(self, attempt: int) -> None:
        """Note the last attempt that the ranks voted on. All of them count their polls from there."""
        if attempt != self._attempt:
            self._attempt, self._polls = attempt, 0

    def all_ready(self, ready: bool, waiting: float = 0.0, advice: str = "") -> bool:
        """Return whether all ranks of this group are ready. Call it equally often in all ranks after each vote.

        The first rank that is not ready decides, so that no rank waits for the others. A yes waits for all of them.

        Args:
            ready: whether this rank is.
            waiting: how long another rank may be busy before it calls this, in seconds, beside its forward pass.
            advice: as of ``decide``.

        Raises:
            GroupFailedExit: this rank cannot learn the decision.
        """
        if self.alone:
            return ready
        self._polls += 1
        poll = RankVote(0, 0, self._progress.step, self._attempt, ready, self._polls)
        return self.decide(poll, waiting + POLL_TIMEOUTS * self._timeout, advice)

    def decide(self, vote: RankVote, seconds: float, advice: str = "") -> bool:
        """Vote, and return the group's decision, within ``seconds``.

        Args:
            vote: of this rank.
            seconds: limit.
            advice: for the case that the other ranks do not vote.

        Raises:
            GroupFailedExit: this rank cannot learn the decision.
        """
        try:
            return self._loop_thread.call(self._link.vote(vote, seconds), seconds + CALL_MARGIN_SECONDS)
        except (TimeoutError, KeepstepError, OSError) as error:
            reason = f"decision of the ranks at step {vote.step} unknown: {type(error).__name__}: {error}{advice}"
            self.fail_group(reason)
            raise GroupFailedExit(reason) from error

    def fail_group(self, reason: str) -> None:
        """Tell the other ranks of the group that it has failed, if they can be reached within a second."""
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):
            self._loop_thread.call(self._link.fail(reason), 1.0)
