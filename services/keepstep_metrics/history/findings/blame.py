"""Name the group that the others wait for. Pure.

All groups end a step together: a slow group makes the others wait, for its quorum request or in a collective. A wait is
thus no fault of the group that waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from keepstep_mesh.text import listed
from keepstep_metrics.history.job import Job

MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Blame:
    slow: tuple[str, ...]
    """Stragglers, the slowest first."""
    seconds: float
    """Own time per step of the slowest group."""
    usual_seconds: float
    """Median own time of the others."""
    wait_share: float
    """Share of their time that the others wait for the slowest group; their median."""
    sentence: str


def blame(job: Job) -> Blame | None:
    """Return the groups that slow the job down; None: no running group is a straggler."""
    there = {name: one for name, one in job.standings.items() if name in job.groups and job.groups[name].is_there}
    slow = sorted((name for name, one in there.items() if one.straggler), key=lambda name: -there[name].seconds)
    others = [name for name in there if not there[name].straggler]
    if not slow or not others:
        return None
    own, usual = there[slow[0]].seconds, median(there[name].seconds for name in others)
    waits = [max(0.0, own - there[name].seconds) / max(own, job.groups[name].whole_p50 or own, 1e-9) for name in others]
    share = median(waits)
    too = f"; so {'is' if len(slow) == 2 else 'are'} {listed(slow[1:], MAX_NAMED)}" if len(slow) > 1 else ""
    sentence = (
        f"{slow[0]} is slow ({_shown(own)}, usual {_shown(usual)}){too}: "
        f"the others wait {100 * share:.0f} % of their time"
    )
    return Blame(tuple(slow), own, usual, share, sentence)


def _shown(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
