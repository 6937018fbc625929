"""Whether the lighthouse keeps a replica group out."""

from __future__ import annotations

import time

from keepstep_cli.errors import Refused, Unreachable
from keepstep_cli.rest import Lighthouse

LEAST_SECONDS = 0.5
"""Of a ban that the lighthouse says still holds, though by our clock it is over."""


async def ban_left(lighthouse: Lighthouse, job: str, group: str) -> float | None:
    """Seconds for which the name ``group`` is banned from ``job``; 0: it is not. None: no lighthouse says."""
    from keepstep_mesh.http import Problem

    try:
        bans = (await lighthouse.get("jobs", job))["bans"]
    except Unreachable:
        return None
    except Refused as error:
        problem = error.__cause__
        return 0.0 if isinstance(problem, Problem) and problem.status == 404 else None
    left = [max(LEAST_SECONDS, ban["until"] - time.time()) for ban in bans if ban["target"] == group]
    return max(left, default=0.0)
