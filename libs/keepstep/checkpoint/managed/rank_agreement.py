"""Agreement of the ranks of one group on the durable checkpoint that they load, and on how the load ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from keepstep_mesh.errors import KeepstepError

Choice = dict[str, Any]
"""The checkpoint to load; empty: none. Plain values, for the other ranks."""
RANK_ROUNDS = 10
"""Waits of a rank for another one of its group, such as rank 0, which may prepare its data before its first step."""


class RankAgreement:
    """Each rank makes the same calls in the same order.

    Args:
        store: returns the store of the ranks. None: the group has one rank.
        rank: of this process.
        world_size: ranks of the group.
        restart: number of times that the group started again.
        still_waiting: called with a sentence for the log after each wait. Raises the error that ended the group, if one
            has.
    """

    def __init__(
        self,
        store: Callable[[], Store | None],
        rank: int,
        world_size: int,
        restart: int,
        still_waiting: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._restart = restart
        self._still_waiting = still_waiting
        self._rounds = 0
        """Number of values that the ranks agreed on."""

    def choice(self, choose: Callable[[], Choice], seconds: float) -> Choice:
        """Return in every rank what ``choose`` returns in rank 0.

        Args:
            choose: called in rank 0.
            seconds: see ``value_of_rank``.

        Raises:
            KeepstepError: rank 0 failed, or did not choose in time.
        """
        store = self._store()
        if store is None:
            return choose()
        key = self._next("resume")
        if self._rank == 0:
            try:
                choice = choose()
            except Exception as error:
                store.set(key, json.dumps({"error": str(error)}))
                raise
            store.set(key, json.dumps(choice))
            return choice
        answer: Choice = json.loads(
            self._value(store, 0, key, seconds, "rank 0 has not chosen a durable checkpoint yet: not at its first step")
        )
        if "error" in answer:
            raise KeepstepError(f"rank 0: {answer['error']}")
        return answer

    def damage(self, damage: str = "", error: str = "", *, seconds: float) -> str:
        """Tell the other ranks how the load of a checkpoint ended, and return the damage of any rank.

        Args:
            damage: why no relay could send the part of this rank; empty: it is here.
            error: the other error that ends this group; then this does not wait.
            seconds: see ``value_of_rank``.

        Raises:
            KeepstepError: another rank told an error, or nothing.
        """
        store = self._store()
        if store is None:
            return damage
        key, outcome = self._next("loaded"), {"damage": damage, "error": error}
        still_loading = "waiting for ranks of this group that still load the durable checkpoint"
        if self._rank:
            store.set(f"{key}/{self._rank}", json.dumps(outcome))
        elif not error:
            for rank in range(1, self._world_size):
                other = json.loads(self._value(store, rank, f"{key}/{rank}", seconds, still_loading))
                outcome = {name: outcome[name] or other[name] for name in outcome}
        if self._rank == 0:
            store.set(key, json.dumps(outcome))
        elif not error:
            outcome = json.loads(self._value(store, 0, key, seconds, still_loading))
        if outcome["error"] and not error:
            raise KeepstepError(f"another rank of this group could not load the checkpoint: {outcome['error']}")
        return outcome["damage"]

    def _next(self, what: str) -> str:
        self._rounds += 1
        return f"keepstep/{self._restart}/{what}/{self._rounds}"

    def _value(self, store: Store, rank: int, key: str, seconds: float, why: str) -> bytes:
        return value_of_rank(rank, store, key, seconds, lambda: self._still_waiting(why))


def value_of_rank(rank: int, store: Store, key: str, seconds: float, still_waiting: Callable[[], None]) -> bytes:
    """Wait until ``rank`` has set ``key``. Rank 0 may come to its first step later than the other ranks.

    Args:
        rank: that sets ``key``.
        store: of the ranks of this group.
        key: name of the value.
        seconds: of each of ``RANK_ROUNDS`` waits.
        still_waiting: called after each of them; raises the error that ended the group, if one has.

    Raises:
        KeepstepError: the rank has not set it.
    """
    for _ in range(RANK_ROUNDS):
        try:
            store.wait([key], timedelta(seconds=seconds))
        except (DistStoreError, TimeoutError):
            still_waiting()
        else:
            return store.get(key)
    raise KeepstepError(
        f"rank {rank} of this group did not begin its first step within {RANK_ROUNDS * seconds:g} s; its log says why"
    )
