"""Whether an order leaves a job fewer groups than it needs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

WORKING = {"asking", "training", "healing", "catching_up", "idle", "spare"}
"""States of groups that can be members of the next quorum."""


def stop_of(policy: dict[str, Any], replicas: Sequence[dict[str, Any]], targets: Collection[str]) -> str:
    """Return a sentence if the job has enough groups now, and too few without ``targets``; else an empty text.

    Args:
        policy: Of the job, as the lighthouse answers it.
        replicas: Its groups, as the lighthouse answers them.
        targets: Names or incarnations of groups, or beginnings of incarnations.
    """
    needed = max(1, policy["min_replicas"])
    working = [one for one in replicas if one["state"] in WORKING and not one["draining"]]
    stay = [one for one in working if not any(_names(target, one) for target in targets)]
    if len(working) < needed or len(stay) >= needed:
        return ""
    return f"the job stops: {len(stay)} of its {len(working)} groups would be left, and min_replicas is {needed}"


def _names(target: str, one: dict[str, Any]) -> bool:
    return target == one["name"] or (":" in target and one["replica_id"].startswith(target))
