"""Merge the requests, heals and votes of the ranks of one group into those of the group. Pure.

* Requests: settings, steps and lineages must be equal. The group's ``commit_failures`` is the largest of the ranks'. It
  leaves, or shrinks only, if any rank does. It allows a heal if all ranks do: a rank that forbids it is at a point
  where its state must not be replaced.
* Where a model exists once, the ranks may be a step apart, as the groups may: some have learned of a commit, and the
  others come to that state before they train. The group then has the newest state, and finishes if any rank does.
* The group finishes if all its ranks do. If only some do, their states differ, because a heal reached only some ranks.
  All of them or none publish the final state; the group still has to publish while one of its ranks has.
* The group's report of its last step has the sum of the ranks' collectives. A group whose ranks begin equally many as
  those of another group thus has an equal sum.
* The group failed by itself if one of its ranks did, else it cannot reach what one of its ranks cannot reach.
* A group is torn, and all its ranks heal, if one rank is torn or if a heal reached only some of its ranks.
* Heals: bytes and rates are added. The heal of the group has ended when those of all ranks have.
* Votes: the key of a vote is (epoch, quorum_id, step, attempt, poll). Votes with different keys are never counted
  together; a vote with an older key than the newest is dropped. A no is decided before all ranks have voted, so the
  others may poll before a slow rank votes: it gets the same no.
* Polls of the ranks are votes between two votes on steps. A poll ends with the first no, so a rank may be ahead of the
  others. An older poll than the newest vote has ended with no, also for a rank that waits for it: the others do not
  take part in it any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.group_messages import RankAsk, RankDecision, RankVote
from keepstep_mesh.protocol.lineage import TORN, is_torn, worth
from keepstep_mesh.protocol.membership import (
    MAX_PEERS,
    OWN,
    PEER,
    TO_PUBLISH,
    UNPUBLISHED,
    StateRoot,
    StepFailure,
    StepReport,
    differ,
    difference,
)
from keepstep_mesh.protocol.messages import MAX_HEAL_ERROR, Healing, ShardReport


class DisagreeError(KeepstepError):
    """The ranks of a group have different states or settings; only a restart of the group repairs it."""


def merge_asks(asks: Mapping[int, RankAsk], replica_id: str, *, healed: bool = False) -> RankAsk:
    """Merge the requests of all ranks into the request of the group.

    Args:
        asks: by rank.
        replica_id: of the group.
        healed: whether the last quorum told this group to heal; then some ranks may have failed to.

    Returns:
        The request of the lowest rank, with the changes that the other ranks make to it.

    Raises:
        DisagreeError: the states or settings of two ranks differ; the message names both ranks.
    """
    first_rank = min(asks)
    first = asks[first_rank]
    if len(asks) == 1 and not is_torn(first.lineage):
        return first
    step, lineage = first.step, first.lineage
    apart = [rank for rank, ask in sorted(asks.items()) if (ask.step, ask.lineage) != (step, lineage)]
    if first.sharded:
        newest = max(asks.values(), key=worth)
        step, lineage = newest.step, newest.lineage
    elif any(is_torn(ask.lineage) for ask in asks.values()) or (apart and healed):
        step, lineage = 0, f"{TORN}{replica_id}"
    elif apart:
        other = asks[apart[0]]
        raise DisagreeError(
            f"the ranks of this group disagree: rank {first_rank} is at step {step} (lineage {lineage!r}), rank "
            f"{apart[0]} at step {other.step} (lineage {other.lineage!r}); restart the group, so that it heals"
        )
    elif len({ask.final for ask in asks.values()}) > 1:
        final = [rank for rank, ask in sorted(asks.items()) if ask.final]
        raise DisagreeError(
            f"the ranks of this group disagree: at step {step}, ranks {final} call finish() and the others begin "
            f"another step; let manager.current_step() decide in all ranks which step is the last"
        )
    _refuse_other_ends(asks)
    return replace(
        first,
        step=step,
        lineage=lineage,
        shrink_only=any(ask.shrink_only for ask in asks.values()),
        commit_failures=max(ask.commit_failures for ask in asks.values()),
        timeout_ms=min(ask.timeout_ms for ask in asks.values()),
        leaving=next((ask.leaving for ask in asks.values() if ask.leaving), ""),
        layout=_digest([ask.layout for _, ask in sorted(asks.items())]),
        root=_merge_roots([ask.root for _, ask in sorted(asks.items())]),
        allow_heal=all(ask.allow_heal for ask in asks.values()),
        settings=_merge_settings(asks),
        last_step=_merge_reports([ask.last_step for _, ask in sorted(asks.items())]),
        final=(any if first.sharded else all)(ask.final for ask in asks.values()),
        failure=_merge_failures([ask.failure for _, ask in sorted(asks.items()) if ask.failure is not None]),
        retry=all(ask.retry for ask in asks.values()),
        replace=next((ask.replace for ask in asks.values() if ask.replace), ""),
        publish=TO_PUBLISH if any(ask.publish == TO_PUBLISH for ask in asks.values()) else first.publish,
    )


def _refuse_other_ends(asks: Mapping[int, RankAsk]) -> None:
    """Raise DisagreeError if only some ranks publish the final state."""
    ends = {rank: ask.publish for rank, ask in sorted(asks.items()) if ask.publish}
    omit = [rank for rank, publish in ends.items() if publish == UNPUBLISHED]
    if others := [rank for rank in ends if omit and rank not in omit]:
        raise DisagreeError(
            f"the ranks of this group disagree: ranks {others} call finish(publish=True) and ranks {omit} call it "
            f"without publish; give all ranks of all groups the same argument"
        )


def _merge_settings(asks: Mapping[int, RankAsk]) -> str:
    """Return the settings of the group; empty if no rank knows its own. DisagreeError if two ranks differ."""
    merged, first_rank = "", 0
    for rank, ask in sorted(asks.items()):
        if differ(merged, ask.settings):
            what = difference(merged, f"rank {first_rank}", ask.settings, f"rank {rank}")
            raise DisagreeError(f"the ranks of this group disagree: {what}; give all ranks the same value and restart")
        if not merged:
            merged, first_rank = ask.settings, rank
    return merged


def _merge_reports(reports: list[StepReport | None]) -> StepReport | None:
    """Return the report of the group, if all ranks report the same step."""
    known = [report for report in reports if report is not None]
    if len(known) < len(reports) or len({(report.quorum_id, report.step) for report in known}) > 1:
        return None
    return replace(
        known[0],
        committed=all(report.committed for report in known),
        collectives=sum(report.collectives for report in known),
        nonfinite=any(report.nonfinite for report in known),
        quantized=sum(report.quantized for report in known),
        values=_digest([report.values for report in known]),
    )


def _digest(of_ranks: list[str]) -> str:
    """Return the digest of the ranks' digests; with one rank its own, and empty if all are."""
    if len(of_ranks) == 1 or not any(of_ranks):
        return of_ranks[0]
    return hashlib.blake2b("\n".join(of_ranks).encode(), digest_size=16).hexdigest()


def _merge_failures(failures: list[StepFailure]) -> StepFailure | None:
    """Return the failure of the group, for the newest quorum that a rank reports; None: no rank does."""
    newest = max((one.quorum_id for one in failures), default=0)
    known = [one for one in failures if one.quorum_id == newest]
    if not known:
        return None
    if own := [one for one in known if one.cause == OWN]:
        return own[0]
    peers = sorted({peer for one in known for peer in one.peers})
    return replace(known[0], cause=PEER, peers=tuple(peers[:MAX_PEERS])) if peers else known[0]


def _merge_roots(roots: list[StateRoot | None]) -> StateRoot | None:
    """Return the root of the group, if all ranks have one of the same state."""
    known = [root for root in roots if root is not None]
    if len(known) < len(roots) or len({(root.step, root.lineage) for root in known}) > 1:
        return None
    if len(known) == 1:
        return known[0]
    digest = hashlib.blake2b("\n".join(root.digest for root in known).encode(), digest_size=32).hexdigest()
    return StateRoot(known[0].step, known[0].lineage, digest)


def merge_healing(of_ranks: Mapping[int, Healing], world_size: int) -> Healing:
    """Merge the reports of the ranks on their heals. ``bytes_total`` is 0 until every rank knows its own."""
    reports = list(of_ranks.values())
    ended = len(reports) == world_size and all(one.ended for one in reports)
    total_known = len(reports) == world_size and all(one.bytes_total or one.ended for one in reports)
    done, seconds = sum(one.bytes_done for one in reports), max(one.seconds for one in reports)
    errors = [f"rank {rank}: {one.error}" for rank, one in sorted(of_ranks.items()) if one.error]
    return Healing(
        bytes_done=done,
        bytes_total=sum(one.bytes_total for one in reports) if total_known else 0,
        bytes_per_second=done / max(seconds, 1e-6)
        if ended
        else sum(o.bytes_per_second for o in reports if not o.ended),
        step=reports[0].step,
        source=reports[0].source,
        via=", ".join(sorted({one.via for one in reports if one.via})),
        seconds=seconds,
        ended=ended,
        error="; ".join(errors)[:MAX_HEAL_ERROR] if ended else "",
    )


def merge_shards(of_ranks: Mapping[int, ShardReport], world_size: int) -> ShardReport | None:
    """Merge the reports of the ranks on their shards. None: not all ranks of the group have reported on the newest
    world.
    """
    world = max(one.world for one in of_ranks.values())
    reports = [one for _, one in sorted(of_ranks.items()) if one.world == world]
    if len(reports) < world_size and all(one.how != "lost" for one in reports):
        return None
    exposed = {hole.keeper: hole for one in reversed(reports) for hole in one.exposed}
    return replace(
        reports[0],
        seconds=max(one.seconds for one in reports),
        copies_bytes=sum(one.copies_bytes for one in reports),
        exposed=tuple(hole for _, hole in sorted(exposed.items())),
        formed=any(one.formed for one in reports),
        keeps=tuple(sorted(set(reports[0].keeps).intersection(*(one.keeps for one in reports)))),
    )


Key = tuple[int, int, int, int, int]


def key_of(vote: RankVote | RankDecision) -> Key:
    """Return what votes that are counted together have in common."""
    return vote.epoch, vote.quorum_id, vote.step, vote.attempt, vote.poll


class CommitBarrier:
    """Counts the votes of one group.

    Args:
        world_size: number of ranks that vote.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._key: Key = (0, 0, 0, -1, 0)
        self._votes: dict[int, bool] = {}
        self._refused: Key | None = None
        """The last vote on a step that was decided with no."""

    def vote(self, rank: int, vote: RankVote) -> RankDecision | None:
        """Count a vote.

        Returns:
            The decision: yes after a yes of every rank with this key, no after the first no; None while it is open.
        """
        key = key_of(vote)
        if key == self._refused:
            return RankDecision(*key[:4], ok=False)
        if self._is_older(key):
            return RankDecision(*key[:4], ok=False, poll=vote.poll) if vote.poll else None
        if key != self._key:
            self._key, self._votes = key, {}
        self._votes[rank] = vote.ok
        if all(self._votes.values()) and len(self._votes) < self._world_size:
            return None
        ok = all(self._votes.values())
        if not ok and not vote.poll:
            self._refused = key
        return RankDecision(*key[:4], ok=ok, poll=vote.poll)

    def _is_older(self, key: Key) -> bool:
        return key[3:] < self._key[3:]

    def has_ended(self, vote: RankVote) -> bool:
        """Return whether the vote is of a poll that other ranks have left. It has ended with no."""
        return vote.poll > 0 and self._is_older(key_of(vote))

    def waiting_for(self) -> list[int]:
        """Return the ranks that have not voted with the newest key."""
        return [rank for rank in range(self._world_size) if rank not in self._votes]
