"""The number of this group, for the samples that it trains on."""

from __future__ import annotations

import os


def group_and_groups(remedy: str) -> tuple[int, int]:
    """Return the number of this group, and the number of groups, from the environment.

    Args:
        remedy: what a script without numbers does, for the error.

    Raises:
        ValueError: the environment has no such numbers.
    """
    groups, group = os.environ.get("NUM_REPLICA_GROUPS", ""), os.environ.get("REPLICA_GROUP_ID", "")
    if groups.isdecimal() and group.isdecimal() and int(group) < int(groups):
        return int(group), int(groups)
    raise ValueError(
        f"NUM_REPLICA_GROUPS={groups!r} and REPLICA_GROUP_ID={group!r} do not say which samples this group trains on: "
        f"set the number of groups, and a number below it (keepstep run does), or {remedy}"
    )
