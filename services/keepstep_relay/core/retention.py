"""Choose the committed checkpoints to drop, and when. Pure. ``machine`` has the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from keepstep_relay.core.checkpoint import Checkpoint
from keepstep_relay.core.events import Kind, Limits

DAY_SECONDS = 86_400.0
OVERWRITTEN = "overwritten by a later save"
LEAST_DURABLE_TTL_SECONDS = DAY_SECONDS
"""Shortest ``durable_ttl_seconds``, and how long a relay that starts waits before it applies any: its clock may have
jumped while it was down."""


class Due(NamedTuple):
    at: float
    checkpoint: Checkpoint
    reason: str
    spare: bool
    """A live state beyond the count: dropped earlier if memory runs short and no process reads it."""


def used_until(one: Checkpoint) -> float:
    """Return when a process last wrote or read a checkpoint, or will have read it."""
    written = one.came_at if one.committed_at is None else one.committed_at
    return max(written, one.read_until)


def longest_unused(checkpoints: Iterable[Checkpoint], limits: Limits, now: float) -> Checkpoint | None:
    """Return the committed live state to drop for a new one, not one that a script saved by itself.

    None: all were used within ``reading_seconds``.
    """
    unused = (
        one
        for one in checkpoints
        if one.facts.kind is Kind.LIVE
        and one.facts.of_manager
        and one.committed_at is not None
        and not one.replaced
        and max(one.committed_at + limits.reading_seconds, one.read_until) <= now
    )
    return min(unused, key=used_until, default=None)


def ends_of_jobs(checkpoints: Iterable[Checkpoint], ttl: float) -> dict[str, float]:
    """Return for each job when its durable checkpoints go, if no process uses any of its checkpoints until then."""
    ends: dict[str, float] = {}
    for one in checkpoints:
        end = max(used_until(one) + ttl, one.began + LEAST_DURABLE_TTL_SECONDS)  # a restored one began at the start
        ends[one.key.job] = max(end, ends.get(one.key.job, end))
    return ends


def retirements(checkpoints: Iterable[Checkpoint], limits: Limits) -> Iterator[Due]:
    """Iterate over the checkpoints to drop. The newest of a job and kind stays, unless its job is over.

    A job that went back to an earlier step has a new quorum_id, so its checkpoints are newer than those of later steps.
    Those that a script saved by itself have no quorum_id. They are a group of their own: neither kind drops the other.
    """
    checkpoints = list(checkpoints)
    ends = ends_of_jobs(checkpoints, limits.durable_ttl_seconds) if limits.durable_ttl_seconds else {}
    groups: dict[tuple[str, Kind, bool], list[tuple[tuple[int, int], float, Checkpoint]]] = {}
    for one in checkpoints:
        if one.replaced:
            yield Due(one.read_until, one, OVERWRITTEN, spare=True)
        elif one.committed_at is not None:
            group_key = (one.key.job, one.facts.kind, one.facts.of_manager)
            groups.setdefault(group_key, []).append((one.facts.age_order, one.committed_at, one))
    for (job, kind, of_manager), group in groups.items():
        live = kind is Kind.LIVE
        count = limits.keep_live if live else limits.keep_durable
        age = 0.0 if live else limits.durable_seconds
        group.sort(key=lambda one: one[:2])
        if live and (ttl := limits.live_ttl_seconds):
            _, committed_at, newest = group[-1]
            reason = f"last live state of job {job}, unused for {ttl:g} s"
            yield Due(max(committed_at, newest.read_until) + ttl, newest, reason, spare=False)
        if not live and of_manager and job in ends:
            days = limits.durable_ttl_seconds / DAY_SECONDS
            reason = f"durable checkpoint of job {job}, which no process used for {days:g} days (--durable-ttl)"
            yield Due(ends[job], group[-1][2], reason, spare=False)
        for newer, (_, committed_at, one) in zip(range(len(group) - 1, 0, -1), group, strict=False):
            if count and newer >= count:
                yield Due(
                    one.read_until, one, f"only the newest {kind.value} checkpoints of a job are kept ({count})", live
                )
            elif age:
                yield Due(max(committed_at + age, one.read_until), one, f"older than {age:g} s", spare=False)
