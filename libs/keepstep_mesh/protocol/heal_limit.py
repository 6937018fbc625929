"""How long a heal may take, as the lighthouse and the group that heals both compute it. Pure."""

from __future__ import annotations

MAX_HEAL_DOUBLINGS = 10


def heal_limit(heal_timeout: float, failed: int) -> float:
    """Return the limit of a heal.

    Args:
        heal_timeout: of the job's policy; the limit of the first heal has the same unit.
        failed: heals of this group that took too long, in a row. Each doubles the limit of the next.
    """
    return heal_timeout * 2.0 ** min(failed, MAX_HEAL_DOUBLINGS)
