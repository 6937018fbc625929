"""Who may not come back: evictions and bans as edits of the job's record. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from keepstep_lighthouse.quorum.events import Ban, EvictOrdered, JobRecord
from keepstep_mesh.protocol.names import name_of

MAX_EVICTED = 1000
"""Evicted incarnations remembered; the oldest are forgotten. Their processes are long gone."""


def refusal(record: JobRecord, replica_id: str, now_unix: float) -> str | None:
    """Why this incarnation may not open a session, as a sentence; None if it may."""
    for ban in record.bans:
        if ban.target in (replica_id, name_of(replica_id)) and now_unix < ban.until:
            return f"{ban.target} is banned for {ban.until - now_unix:.0f} s more: {ban.reason}"
    if replica_id in record.evicted:
        return f"{replica_id} was evicted; a new incarnation may come unless its name is banned"
    return None


def evict(record: JobRecord, incarnations: Iterable[str], order: EvictOrdered, now_unix: float) -> JobRecord:
    """These incarnations may not come back; with ``ban_seconds`` nothing that ``order.target`` names may, so long."""
    evicted = tuple(dict.fromkeys((*record.evicted, *incarnations)))[-MAX_EVICTED:]
    bans = tuple(ban for ban in record.bans if now_unix < ban.until and ban.target != order.target)
    if order.ban_seconds > 0:
        bans = (*bans, Ban(order.target, now_unix + order.ban_seconds, order.reason))
    return replace(record, evicted=evicted, bans=bans)


def readmit(record: JobRecord, target: str, now_unix: float) -> JobRecord:
    """Lifts what stands against ``target``, a stable name (then its incarnations too) or one incarnation."""
    gone = lifted(record, target)
    return replace(
        record,
        evicted=tuple(one for one in record.evicted if one not in gone),
        bans=tuple(ban for ban in record.bans if now_unix < ban.until and ban.target not in gone),
    )


def lifted(record: JobRecord, target: str) -> list[str]:
    """What a readmission of ``target`` lets back in: targets of bans, then evicted incarnations.

    The target of a ban is a stable name, which may have a colon, unless it was evicted as an incarnation.
    """
    incarnations = [one for one in record.evicted if target in (one, name_of(one))]
    return [ban.target for ban in record.bans if ban.target in (target, *incarnations)] + incarnations
