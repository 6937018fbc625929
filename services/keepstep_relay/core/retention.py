"""Choose the committed checkpoints to drop, and when. Pure. ``machine`` has the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from keepstep_relay.core.checkpoint import Checkpoint
from keepstep_relay.core.events import Kind, Limits


class Due(NamedTuple):
    at: float
    checkpoint: Checkpoint
    reason: str
    spare: bool
    """A live state beyond the count: dropped earlier if memory runs short and no process reads it."""


def retirements(checkpoints: Iterable[Checkpoint], limits: Limits) -> Iterator[Due]:
    """Iterate over the checkpoints to drop. The newest of a job and kind stays, unless it is live and unused.

    A job that went back to an earlier step has a new quorum_id, so its checkpoints are newer than those of later steps.
    Those that a script saved by itself have no quorum_id. They are a group of their own: neither kind drops the other.
    """
    groups: dict[tuple[str, Kind, bool], list[tuple[tuple[int, int], float, Checkpoint]]] = {}
    for one in checkpoints:
        if one.committed_at is not None:
            group_key = (one.key.job, one.facts.kind, one.facts.of_manager)
            groups.setdefault(group_key, []).append((one.facts.age_order, one.committed_at, one))
    for (_, kind, _), group in groups.items():
        live = kind is Kind.LIVE
        count = limits.keep_live if live else limits.keep_durable
        age = limits.live_seconds if live else limits.durable_seconds
        group.sort(key=lambda one: one[:2])
        if live and (ttl := limits.live_ttl_seconds):
            _, committed_at, newest = group[-1]
            reason = f"last live state of job {newest.key.job}, unused for {ttl:g} s (--live-ttl)"
            yield Due(max(committed_at, newest.read_until) + ttl, newest, reason, spare=False)
        for newer, (_, committed_at, one) in zip(range(len(group) - 1, 0, -1), group, strict=False):
            if count and newer >= count:
                yield Due(
                    one.read_until, one, f"only the newest {kind.value} checkpoints of a job are kept ({count})", live
                )
            elif age:
                yield Due(max(committed_at + age, one.read_until), one, f"older than {age:g} s", spare=False)
