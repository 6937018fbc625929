"""Gather the requests and the votes of all ranks of a group, and answer all ranks alike. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.merging import CommitBarrier, key_of
from keepstep.group.ranks.rank_link import GroupSettings, denial
from keepstep_mesh.errors import SessionClosed
from keepstep_mesh.protocol.group_messages import RankAsk, RankDenied, RankVote

_Ask = tuple[RankAsk, asyncio.Future[QuorumPlan]]


class GatheredAsks:
    """The requests of all ranks for the next plan of their group.

    Args:
        settings: of the group.
        request: called with the requests of all ranks, by rank; returns the plan.
        start_task: runs the coroutine that calls it.
    """

    def __init__(
        self,
        settings: GroupSettings,
        request: Callable[[dict[int, RankAsk]], Coroutine[object, object, QuorumPlan]],
        start_task: Callable[[Coroutine[object, object, None]], asyncio.Task[None]],
    ) -> None:
        self.waiting: dict[int, _Ask] = {}
        """The requests of the next round, which begins when all ranks have asked."""
        self.in_round: dict[int, _Ask] = {}
        """The requests that the open round answers."""
        self._settings = settings
        self._request = request
        self._start_task = start_task
        self._gone: set[int] = set()
        self._round_task: asyncio.Task[None] | None = None

    async def ask(self, rank: int, ask: RankAsk) -> QuorumPlan:
        """Add the request of a rank, and wait for the plan. See ``RankLink.ask`` for errors."""
        if self._gone:
            raise SessionClosed(f"ranks {sorted(self._gone)} of this group have left it; restart the group")
        future: asyncio.Future[QuorumPlan] = asyncio.get_running_loop().create_future()
        asks = self.in_round or self.waiting
        if rank in asks:  # the rank gave up on that request
            asks[rank][1].cancel()
        asks[rank] = (ask, future)
        if self._is_complete():
            self._begin_round()
        try:
            async with asyncio.timeout(ask.timeout_ms / 1000 * (1 + self._settings.quorum_retries) + 1.0):
                return await asyncio.shield(future)
        except TimeoutError:
            if self.waiting.get(rank, (ask, None))[1] is not future:
                return await future  # the round has begun, and has its own deadline
            missing = [r for r in range(self._settings.world_size) if r not in self.waiting]
            if not missing:
                self._begin_round()  # which tells the ranks that they disagree
                return await future
            reason = (
                f"timed out after {ask.timeout_ms / 1000:g} s: ranks {missing} of this group did not start the step"
            )
            self.deny("deadline", reason)
            raise TimeoutError(reason) from None

    def _is_complete(self) -> bool:
        """Return whether all ranks have asked, and for the same.

        While quorums form in the background, a rank may call ``finish`` when another one still has a request for a
        step. That one is about to withdraw it.
        """
        if len(self.waiting) < self._settings.world_size:
            return False
        asks = [ask for ask, _ in self.waiting.values()]
        return len({ask.final for ask in asks}) == 1 or not any(ask.min_groups and not ask.final for ask in asks)

    def _begin_round(self) -> None:
        self.in_round, self.waiting = self.waiting, {}
        self._round_task = self._start_task(self._round(self.in_round))

    def withdraw(self, rank: int, request: int) -> None:
        """Take back a request that was made in the background, and end the round that answers it.

        The other ranks get ``TimeoutError``.

        Args:
            rank: made the request.
            request: its number.
        """
        asks = self.in_round or self.waiting
        if rank not in asks or asks[rank][0].request != request or not asks[rank][0].min_groups:
            return
        asks.pop(rank)[1].cancel()
        if asks is not self.in_round or self._round_task is None:
            return
        self._round_task.cancel()
        self.in_round = {}
        for _, future in asks.values():
            if not future.done():
                future.set_exception(TimeoutError(f"rank {rank} of this group withdrew its request"))
                future.exception()

    def rank_came(self, rank: int) -> None:
        """Take requests again, if this rank was the one that had left."""
        self._gone.discard(rank)

    def rank_left(self, rank: int, reason: str) -> None:
        """Deny all requests from now on: a group does not train without one of its ranks."""
        self._gone.add(rank)
        self.deny("closed", f"rank {rank} has left this group: {reason}")

    def deny(self, code: str, reason: str) -> None:
        """Deny the requests of the next round. ``code``: as in ``RankDenied``."""
        asks, self.waiting = self.waiting, {}
        for _, future in asks.values():
            if not future.done():
                future.set_exception(denial(RankDenied(0, code, reason)))
                future.exception()  # marks it as seen: perhaps no rank waits any more

    async def _round(self, asks: dict[int, _Ask]) -> None:
        try:
            plan = await self._request({rank: ask for rank, (ask, _) in asks.items()})
        except asyncio.CancelledError:
            for _, future in asks.values():
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  every rank gets the same answer, whatever it is
            for _, future in asks.values():
                if not future.done():
                    future.set_exception(error)
                    future.exception()
            return
        finally:
            if self.in_round is asks:
                self.in_round = {}
        for _, future in asks.values():
            if not future.done():
                future.set_result(plan)


class GatheredVotes:
    """The votes of all ranks, on a step or in a poll."""

    def __init__(self, world_size: int) -> None:
        self._barrier = CommitBarrier(world_size)
        self._votes: dict[int, tuple[RankVote, asyncio.Future[bool]]] = {}

    def cast(self, rank: int, vote: RankVote) -> asyncio.Future[bool]:
        """Count the vote of a rank. The future completes with the group's decision."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if rank in self._votes:  # the rank gave up on that vote
            self._votes[rank][1].cancel()
        self._votes[rank] = (vote, future)
        decision = self._barrier.vote(rank, vote)
        for other, (cast, waiting) in tuple(self._votes.items()):
            decided = decision is not None and key_of(cast) == key_of(decision)
            if decided or self._barrier.has_ended(cast):
                del self._votes[other]
                if not waiting.done():
                    waiting.set_result(decision is not None and decided and decision.ok)
        return future

    def missing(self) -> list[int]:
        """Return the ranks that have not voted on the newest step."""
        return self._barrier.waiting_for()
