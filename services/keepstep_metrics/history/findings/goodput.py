"""Share of the time of a job's groups that was spent in committed steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep_metrics.history.findings.blame import Blame
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.timeseries.timeline import LIVING, State
from keepstep_metrics.history.work import Work, whole

LEAST_WAIT = 0.01
"""Share of the time that a sentence names."""
BADPUT = {
    State.WAITING_QUORUM: "ELASTIC_REINITIALIZATION",
    State.WAITING_SLOW_GROUP: "CUSTOM_BADPUT_EVENTS",
    State.HEALING: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    State.RETRYING: "WASTED_PROGRESS_FROM_DISRUPTION",
    State.LOST: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    State.DRAINING: "OTHER",
}
"""The type of badput of each state but ``training``, as Google's ml-goodput-measurement names it."""


def group_seconds(job: Job, since: float, until: float) -> dict[State, float]:
    """Return the seconds of all groups, by state."""
    return whole(summing(job, since, until))


def summing(job: Job, since: float, until: float) -> Work[dict[State, float]]:
    """Do ``group_seconds`` in pieces."""
    total = dict.fromkeys(LIVING, 0.0)
    for group in [*job.groups.values()]:
        for state, seconds in group.timeline.seconds(since, until).items():
            total[state] += seconds
        yield
    return total


def ratio(seconds: Mapping[State, float]) -> float | None:
    """Return the goodput for group-seconds by state; None: the job had no groups."""
    life = sum(seconds.values())
    return seconds[State.TRAINING] / life if life else None


def sentence(seconds: Mapping[State, float], slow: Blame | None) -> str:
    """Return the goodput and the waits for slow groups, as a sentence; empty: the job had no groups.

    Args:
        slow: the group that is slow now. The waits in collectives are part of the goodput, and only this tells them.
    """
    if (share := ratio(seconds)) is None:
        return ""
    waited = seconds[State.WAITING_SLOW_GROUP] / sum(seconds.values())
    text = f"goodput {100 * share:.0f} %"
    if waited >= LEAST_WAIT:
        text += f"; the groups waited {100 * waited:.0f} % of their time for quorums with a slow group"
    return f"{text}; now {slow.sentence}" if slow is not None else text


def badput(seconds: Mapping[State, float]) -> dict[str, float]:
    """Return the group-seconds that were not good, by the type of badput."""
    return {kind: seconds[state] for state, kind in BADPUT.items()}


def shares(seconds: Mapping[State, float]) -> dict[str, float]:
    """Return the share of each state; the shares sum to one, unless all seconds are 0."""
    total = sum(seconds.values()) or 1.0
    return {state.value: seconds[state] / total for state in LIVING}
