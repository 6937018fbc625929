"""Conditions of a job that an operator should look at: the alerts of ``deploy/prometheus/rules.yml``. Pure.

They have the names, severities, and limits of the rules, and need no Prometheus. They are computed from the history of
the job, so a condition shows at once where a rule waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from keepstep_mesh.text import listed
from keepstep_metrics.history.findings import goodput
from keepstep_metrics.history.findings.blame import blame
from keepstep_metrics.history.job import Job

NO_COMMIT_SECONDS = 120.0
GOODPUT_SECONDS = 600.0
GOODPUT_LIMIT = 0.8
DISCARDED_LIMIT = 0.05
LOST_LIMIT = 5
HEALS_LIMIT = 2
LEAST_STEPS = 20
CHECKPOINTS_LIMIT = 3
MAX_NAMED = 3
CHECKPOINT_SECONDS = 300.0
EXPOSED_SECONDS = 60.0
FRESH_SECONDS = 5.0
"""A page asks four times a second; adding the times of 1,000 groups takes milliseconds."""
SEVERITIES = {
    "TrainingStands": "critical",
    "GroupsAreLostOften": "warning",
    "StepsAreDiscarded": "warning",
    "GoodputIsLow": "warning",
    "GroupIsAStraggler": "warning",
    "JobWentBack": "critical",
    "JobFailed": "critical",
    "HealsFail": "warning",
    "ReplicasDiffer": "critical",
    "ContributionNotFinite": "warning",
    "GroupHangs": "critical",
    "CollectivesDiffer": "warning",
    "OptimizersDiffer": "warning",
    "PortsMislead": "warning",
    "MemberIsExposed": "warning",
    "ShardsAreLost": "critical",
    "CheckpointIsOld": "warning",
    "CheckpointWasSkipped": "critical",
}
"""Severity of each alert."""
EVENT_ALERTS = {
    "went_back": "JobWentBack",
    "job_failed": "JobFailed",
    "replicas_differ": "ReplicasDiffer",
    "nonfinite": "ContributionNotFinite",
    "collectives_differ": "CollectivesDiffer",
    "hung": "GroupHangs",
    "values_differ": "OptimizersDiffer",
    "port_misled": "PortsMislead",
    "shards_lost": "ShardsAreLost",
}
"""Events that are alerts for ten minutes, with the sentence of the last one."""


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    severity: str
    """``critical`` or ``warning``."""
    sentence: str


def alerts(job: Job, now: float) -> tuple[Alert, ...]:
    """Return the alerts that fire now, critical ones first. The result is reused for ``FRESH_SECONDS``."""
    known = _known.get(job)
    if known is None or not 0 <= now - known[0] < FRESH_SECONDS:
        found = sorted(_found(job, now), key=lambda one: (one.severity != "critical", one.name))
        known = _known[job] = now, tuple(found)
    return known[1]


_known: WeakKeyDictionary[Job, tuple[float, tuple[Alert, ...]]] = WeakKeyDictionary()
"""When the alerts of a job were computed, and which fired."""


def _found(job: Job, now: float) -> list[Alert]:
    since = now - GOODPUT_SECONDS
    recent = [event for event in job.events if event.t >= since]
    kinds = Counter(event.event for event in recent)
    last_sentence = {event.event: event.sentence for event in recent}
    found: list[Alert] = []

    def add(name: str, sentence: str) -> None:
        found.append(Alert(name, SEVERITIES[name], sentence))

    last_commit = max((one.committed_at for one in job.groups.values()), default=0.0)
    if job.has_groups and last_commit and now - last_commit > NO_COMMIT_SECONDS:
        add("TrainingStands", f"no step has been committed for {_minutes(now - last_commit)}")
    if (lost := sum(one.t >= since for one in job.failures)) > LOST_LIMIT:
        add("GroupsAreLostOften", f"{lost} groups were lost in ten minutes")
    committed, discarded = _steps(job, since, now)
    if committed + discarded >= LEAST_STEPS and discarded / (committed + discarded) > DISCARDED_LIMIT:
        add("StepsAreDiscarded", f"{100 * discarded / (committed + discarded):.0f} % of the steps do not commit")
    ratio = goodput.ratio(goodput.group_seconds(job, since, now))
    if job.has_groups and now - job.first_seen > GOODPUT_SECONDS and ratio is not None and ratio < GOODPUT_LIMIT:
        add("GoodputIsLow", f"goodput of the last ten minutes is {100 * ratio:.0f} %")
    if (slow := blame(job)) is not None:
        add("GroupIsAStraggler", slow.sentence)
    if kinds["heal_failed"] + kinds["heal_given_up"] > HEALS_LIMIT:
        last = next(event for event in reversed(recent) if event.event in ("heal_failed", "heal_given_up"))
        add(
            "HealsFail", f"{kinds['heal_failed'] + kinds['heal_given_up']} heals failed in ten minutes; {last.sentence}"
        )
    exposed = [one for one in job.groups.values() if one.exposed_at and now - one.exposed_at > EXPOSED_SECONDS]
    if exposed:
        said = listed((f"{one.name} ({one.exposed_why})" for one in exposed), MAX_NAMED)
        add("MemberIsExposed", f"the loss of a member would lose its shards: {said}")
    if (old := _old_checkpoint(job, now)) is not None:
        add("CheckpointIsOld", old)
    if job.durable is not None and job.durable.skipped_at >= since:
        skipped = ", ".join(job.durable.skipped)
        add("CheckpointWasSkipped", f"the job resumed from an older durable checkpoint; damaged: {skipped}")
    for kind, name in EVENT_ALERTS.items():
        if kind in last_sentence:
            add(name, last_sentence[kind])
    return found


def _old_checkpoint(job: Job, now: float) -> str | None:
    """Return how old the newest durable checkpoint is, as a sentence; None: it is not too old."""
    durable = job.durable
    if durable is None or not job.has_groups:
        return None
    steps, seconds = durable.age_steps(job.step), now - durable.committed_at
    if not durable.every or steps <= CHECKPOINTS_LIMIT * durable.every or seconds <= CHECKPOINT_SECONDS:
        return None
    reason = f": {durable.error}" if durable.error else ""
    return f"the newest durable checkpoint is {steps} steps and {_minutes(seconds)} old{reason}"


def _steps(job: Job, since: float, until: float) -> tuple[int, int]:
    """Return the committed and the discarded steps of all groups."""
    committed = discarded = 0
    for _, cells in job.steps.ring(since, 60, until).rows(since, until):
        committed, discarded = committed + int(cells[0]), discarded + int(cells[1])
    return committed, discarded


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
