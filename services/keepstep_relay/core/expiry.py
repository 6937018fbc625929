"""Uploads that end because their ranks are silent, and parts that end because no process reads them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from keepstep_relay.core.checkpoint import NEVER, Checkpoint
from keepstep_relay.core.events import Kind, Limits, State
from keepstep_relay.core.retention import retirements

MAX_NAMED = 10
"""Silent ranks in a reason."""


class Expired(NamedTuple):
    checkpoint: Checkpoint
    reason: str
    state: State | None
    is_fault: bool
    """False: an expected end, such as that of a live state that served its time."""


def expired(checkpoints: Iterable[Checkpoint], limits: Limits, now: float) -> Iterator[Expired]:
    """Iterate over the checkpoints without a commit whose time is over."""
    for one in checkpoints:
        if one.committed_at is not None or one.sealing:
            continue
        if one.is_part and one.read_until <= now:
            reason = f"partial live state without a reader for {limits.reading_seconds:g} s"
            yield Expired(one, reason, None, is_fault=True)
        elif one.longest_silent_since + limits.upload_seconds <= now:
            silent = list(islice(one.silent_since(now - limits.upload_seconds), MAX_NAMED + 1))
            ranks = ", ".join(map(str, silent[:MAX_NAMED])) + (" and others" if len(silent) > MAX_NAMED else "")
            reason = f"no sign of life of rank {ranks} for {limits.upload_seconds:g} s (--upload-timeout)"
            yield Expired(one, reason, State.ABORTED, is_fault=one.facts.kind is Kind.DURABLE)


def next_expiry(checkpoints: Iterable[Checkpoint], limits: Limits) -> float:
    """Return when the next checkpoint or holder expires; ``NEVER`` if none does."""
    checkpoints = list(checkpoints)
    ends = [NEVER]
    for one in checkpoints:
        if one.is_part:
            ends.append(one.read_until)
        elif one.committed_at is None and not one.sealing:
            ends.append(one.longest_silent_since + limits.upload_seconds)
        ends.extend(holder.until for holder in one.holders.values())
    ends.extend(due.at for due in retirements(checkpoints, limits))
    return min(ends)
