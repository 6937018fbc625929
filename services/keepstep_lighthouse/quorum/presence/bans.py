"""Evictions and bans, as edits of the job's record. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from keepstep_lighthouse.quorum.events import EvictOrdered
from keepstep_lighthouse.quorum.job_record import Ban, JobRecord
from keepstep_mesh.protocol.names import name_of

MAX_EVICTED = 1000
"""Number of evicted incarnations in a record; the oldest are dropped."""


def refusal(record: JobRecord, replica_id: str, now_unix: float) -> str | None:
    """Return why this incarnation may not open a session, as a sentence; None: it may."""
    for ban in record.bans:
        if ban.target in (replica_id, name_of(replica_id)) and now_unix < ban.until:
            return f"{ban.target} is banned for {ban.until - now_unix:.0f} s more: {ban.reason}"
    if replica_id in record.evicted:
        return f"{replica_id} was evicted; a new incarnation may connect unless its name is banned"
    return None


def evict(record: JobRecord, incarnations: Iterable[str], order: EvictOrdered, now_unix: float) -> JobRecord:
    """Refuse these incarnations from now on; with ``ban_seconds``, also everything that ``order.target`` names."""
    evicted = tuple(dict.fromkeys((*record.evicted, *incarnations)))[-MAX_EVICTED:]
    bans = tuple(ban for ban in record.bans if now_unix < ban.until and ban.target != order.target)
    if order.ban_seconds > 0:
        bans = (*bans, Ban(order.target, now_unix + order.ban_seconds, order.reason))
    return replace(record, evicted=evicted, bans=bans)


def readmit(record: JobRecord, target: str, now_unix: float) -> JobRecord:
    """Lift bans and evictions of ``target``: one incarnation, or a stable name and its incarnations."""
    gone = lifted(record, target)
    return replace(
        record,
        evicted=tuple(one for one in record.evicted if one not in gone),
        bans=tuple(ban for ban in record.bans if now_unix < ban.until and ban.target not in gone),
    )


def lifted(record: JobRecord, target: str) -> list[str]:
    """Return the bans and then the evicted incarnations that a readmission of ``target`` lifts.

    The target of a ban is a stable name (which may have a colon), unless it was evicted as an incarnation.
    """
    incarnations = [one for one in record.evicted if target in (one, name_of(one))]
    return [ban.target for ban in record.bans if ban.target in (target, *incarnations)] + incarnations
