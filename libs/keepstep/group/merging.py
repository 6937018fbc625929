"""What the ranks of one group agree on before they speak with one voice. Pure.

* A request of the group merges those of its ranks: their settings, steps and lineages must agree, ``commit_failures``
  is the largest, ``shrink_only`` and leaving are any, ``allow_heal`` is all: a rank that forbids it is at a point where
  its state must not be replaced, and the answer's policy holds for every rank.
* A heal that reached some ranks only leaves a state that is whole nowhere: the group is torn, and all its ranks heal
  again. So is one of which any rank is torn.
* The heal of a group is that of all its ranks: their bytes and rates are added, it has ended when all have.
* A vote is keyed by (epoch, quorum_id, step, attempt). Only votes of one key are counted together; one that comes for
  an older key than the barrier has seen is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.group_messages import RankAsk, RankDecision, RankVote
from keepstep_mesh.protocol.job_settings import differ, difference
from keepstep_mesh.protocol.lineage import TORN, is_torn
from keepstep_mesh.protocol.membership import StateRoot
from keepstep_mesh.protocol.messages import MAX_HEAL_ERROR, Healing


class DisagreeError(KeepstepError):
    """The ranks of a group hold different states or settings. Nothing mends that but a restart of the group."""


def merge_asks(asks: Mapping[int, RankAsk], replica_id: str, *, healed: bool = False) -> RankAsk:
    """Merge the requests of all ranks into the request of the group.

    Args:
        asks: by rank.
        replica_id: of the group.
        healed: whether the last quorum told this group to heal; then some ranks may have failed to.

    Returns:
        The request of the lowest rank, with what other ranks change.

    Raises:
        DisagreeError: the states or settings of two ranks differ; the message names both ranks.
    """
    first_rank = min(asks)
    first = asks[first_rank]
    if len(asks) == 1 and not is_torn(first.lineage):
        return first
    step, lineage = first.step, first.lineage
    apart = [rank for rank, ask in sorted(asks.items()) if (ask.step, ask.lineage) != (step, lineage)]
    if any(is_torn(ask.lineage) for ask in asks.values()) or (apart and healed):
        step, lineage = 0, f"{TORN}{replica_id}"
    elif apart:
        other = asks[apart[0]]
        raise DisagreeError(
            f"the ranks of this group disagree: rank {first_rank} is at step {step} (lineage {lineage!r}), rank "
            f"{apart[0]} at step {other.step} (lineage {other.lineage!r}); restart the group, it will heal from another"
        )
    layouts = [ask.layout for _, ask in sorted(asks.items())]
    if len(layouts) == 1 or not any(layouts):
        layout = layouts[0]
    else:
        layout = hashlib.blake2b("\n".join(layouts).encode(), digest_size=16).hexdigest()
    return replace(
        first,
        step=step,
        lineage=lineage,
        shrink_only=any(ask.shrink_only for ask in asks.values()),
        commit_failures=max(ask.commit_failures for ask in asks.values()),
        timeout_ms=min(ask.timeout_ms for ask in asks.values()),
        leaving=next((ask.leaving for ask in asks.values() if ask.leaving), ""),
        layout=layout,
        root=_merge_roots([ask.root for _, ask in sorted(asks.items())]),
        allow_heal=all(ask.allow_heal for ask in asks.values()),
        settings=_merge_settings(asks),
    )


def _merge_settings(asks: Mapping[int, RankAsk]) -> str:
    """Those of all ranks; empty when no rank says its own."""
    merged, first_rank = "", 0
    for rank, ask in sorted(asks.items()):
        if differ(merged, ask.settings):
            what = difference(merged, f"rank {first_rank}", ask.settings, f"rank {rank}")
            raise DisagreeError(f"the ranks of this group disagree: {what}; give all ranks the same value and restart")
        if not merged:
            merged, first_rank = ask.settings, rank
    return merged


def _merge_roots(roots: list[StateRoot | None]) -> StateRoot | None:
    """That of the group, when all ranks have one of the same state."""
    known = [root for root in roots if root is not None]
    if len(known) < len(roots) or len({(root.step, root.lineage) for root in known}) > 1:
        return None
    if len(known) == 1:
        return known[0]
    digest = hashlib.blake2b("\n".join(root.digest for root in known).encode(), digest_size=32).hexdigest()
    return StateRoot(known[0].step, known[0].lineage, digest)


def merge_healing(of_ranks: Mapping[int, Healing], world_size: int) -> Healing:
    """The heal of the group out of those of its ranks. It has ended when all have; its bytes are known when all are."""
    said = list(of_ranks.values())
    ended = len(said) == world_size and all(one.ended for one in said)
    total_known = len(said) == world_size and all(one.bytes_total or one.ended for one in said)
    done, seconds = sum(one.bytes_done for one in said), max(one.seconds for one in said)
    errors = [f"rank {rank}: {one.error}" for rank, one in sorted(of_ranks.items()) if one.error]
    return Healing(
        bytes_done=done,
        bytes_total=sum(one.bytes_total for one in said) if total_known else 0,
        bytes_per_second=done / max(seconds, 1e-6) if ended else sum(o.bytes_per_second for o in said if not o.ended),
        step=said[0].step,
        source=said[0].source,
        via=", ".join(sorted({one.via for one in said if one.via})),
        seconds=seconds,
        ended=ended,
        error="; ".join(errors)[:MAX_HEAL_ERROR] if ended else "",
    )


Key = tuple[int, int, int, int]


class CommitBarrier:
    """Counts the votes of one group.

    Args:
        world_size: ranks whose votes make a decision.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._key: Key = (0, 0, 0, -1)
        self._votes: dict[int, bool] = {}

    def vote(self, rank: int, vote: RankVote) -> RankDecision | None:
        """Takes a vote; the decision once it is known: yes when every rank voted so under this key, no with the first
        no.
        """
        key = (vote.epoch, vote.quorum_id, vote.step, vote.attempt)
        if vote.attempt < self._key[3]:
            return None
        if key != self._key:
            self._key, self._votes = key, {}
        self._votes[rank] = vote.ok
        if all(self._votes.values()) and len(self._votes) < self._world_size:
            return None
        return RankDecision(*key, ok=all(self._votes.values()))

    def waiting_for(self) -> list[int]:
        """Ranks that have not voted under the newest key."""
        return [rank for rank in range(self._world_size) if rank not in self._votes]
