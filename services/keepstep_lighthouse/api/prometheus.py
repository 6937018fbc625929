"""Prometheus metrics of a lighthouse. Most of them are computed when they are scraped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from keepstep_lighthouse.incidents.judgement import Verdict
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.serving.process_metrics import registry_of

FROM_ZERO = (
    "went_back",
    "job_failed",
    "heal_failed",
    "heal_given_up",
    "replicas_differ",
    "nonfinite",
    "collectives_differ",
    "hung",
    "values_differ",
    "port_misled",
    "shards_lost",
)
"""Events whose counters start at 0: PromQL's `increase` ignores the first value of a series."""
MAX_IDLE_SHOWN = 20
"""Number of jobs without sessions that get series of their own; the most recently used ones."""
UNCOUNTED = (
    ReplicaState.KEPT_OUT,
    ReplicaState.PARTED,
    ReplicaState.SPARE,
    ReplicaState.ABSENT,
    ReplicaState.GONE,
)
"""States in which a group does not train."""


VERDICTS = tuple(one.value for one in Verdict if one is not Verdict.ORDERED)


class _Lighthouse(Collector):
    def __init__(self, lighthouse: LighthouseNode) -> None:
        self._lighthouse = lighthouse

    def collect(self) -> Iterator[Metric]:
        one = self._lighthouse
        yield GaugeMetricFamily(
            "keepstep_lighthouse_ready", "1 while this lighthouse leads", float(one.term is not None)
        )
        yield GaugeMetricFamily(
            "keepstep_lighthouse_epoch", "epoch of its term; 0: it does not lead", one.term.epoch if one.term else 0
        )
        yield GaugeMetricFamily(
            "keepstep_lighthouse_store_trouble",
            "1 while the store accepts no writes",
            float(one.write_trouble is not None),
        )
        yield GaugeMetricFamily("keepstep_lighthouse_sessions", "open sessions of workers", len(one.sessions))
        yield GaugeMetricFamily(
            "keepstep_lighthouse_standbys", "standby lighthouses that follow this one", len(one.followers)
        )
        yield CounterMetricFamily(
            "keepstep_lighthouse_bad_messages", "sessions closed because of an invalid message", one.bad_messages.total
        )
        services = GaugeMetricFamily("keepstep_services", "registered services", labels=["kind"])
        for kind, count in Counter(record.kind for record in one.registry.records).items():
            services.add_metric([kind], count)
        yield services
        events = CounterMetricFamily("keepstep_events", "entries of the event log", labels=["job", "kind"])
        jobs = shown(one.jobs.values())
        from_zero = dict.fromkeys(FROM_ZERO, 0)
        for name in ("", *(job.name for job in jobs)):
            for kind, count in ((from_zero if name else {}) | one.events.counts.get(name, {})).items():
                events.add_metric([name, kind], count)
        yield events
        totals = CounterMetricFamily(
            "keepstep_lighthouse_events",
            "entries of the event log, all jobs together, deleted ones included",
            labels=["kind"],
        )
        for kind, count in (from_zero | one.events.totals).items():
            totals.add_metric([kind], count)
        yield totals
        yield from _of_jobs(jobs, time.monotonic())


def shown(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs that get series of their own: those in use, and ``MAX_IDLE_SHOWN`` others."""
    last_used = sorted(jobs, key=lambda job: job.used_at, reverse=True)
    idle = [job for job in last_used if not job.sessions]
    return [job for job in last_used if job.sessions] + idle[:MAX_IDLE_SHOWN]


def _of_jobs(jobs: Iterable[Job], now: float) -> Iterator[Metric]:
    quorum_id = GaugeMetricFamily("keepstep_quorum_id", "number of the current quorum", labels=["job"])
    members = GaugeMetricFamily("keepstep_quorum_members", "groups in the current quorum", labels=["job"])
    step = GaugeMetricFamily("keepstep_quorum_step", "step of the last announced quorum", labels=["job"])
    rounds = CounterMetricFamily("keepstep_quorum_rounds", "quorums announced and confirmed", labels=["job"])
    waits = HistogramMetricFamily(
        "keepstep_quorum_wait_seconds", "from a group's request for a quorum to the answer", labels=["job"]
    )
    steps = CounterMetricFamily("keepstep_steps", "steps by which the job advanced", labels=["job"])
    step_seconds = HistogramMetricFamily(
        "keepstep_step_seconds", "from a group's quorum to its next request, committed or not", labels=["job"]
    )
    of_groups = CounterMetricFamily("keepstep_group_steps", "steps of groups, by outcome", labels=["job", "outcome"])
    nonfinite = CounterMetricFamily(
        "keepstep_nonfinite_steps", "steps of groups that contributed a NaN or an infinity", labels=["job"]
    )
    retried = CounterMetricFamily(
        "keepstep_retried_steps", "steps that groups took again after the loss of a member", labels=["job"]
    )
    failures = CounterMetricFamily(
        "keepstep_group_failures",
        "groups that were lost, or whose scripts ended with an error, after they had trained and without an order",
        labels=["job"],
    )
    healed = CounterMetricFamily("keepstep_healed_bytes", "bytes received by groups that healed", labels=["job"])
    heal_seconds = HistogramMetricFamily("keepstep_heal_seconds", "duration of a heal that succeeded", labels=["job"])
    gaps = HistogramMetricFamily(
        "keepstep_commit_gap_seconds", "from one step that the job committed to the next", labels=["job"]
    )
    sharded = GaugeMetricFamily(
        "keepstep_one_copy_members", "groups that hold shards of a model that exists once", labels=["job"]
    )
    exposed = GaugeMetricFamily(
        "keepstep_one_copy_exposed", "members without copies of their shards at a keeper", labels=["job"]
    )
    copies = GaugeMetricFamily(
        "keepstep_one_copy_copies_bytes", "copies of shards that members keep for others", labels=["job"]
    )
    recoveries = HistogramMetricFamily(
        "keepstep_one_copy_recovery_seconds", "duration of a recovery after a change of members", labels=["job"]
    )
    groups = GaugeMetricFamily("keepstep_groups", "replica groups by state", labels=["job", "state"])
    group_step = GaugeMetricFamily("keepstep_group_step", "step of a group", labels=["job", "group"])
    held_up = GaugeMetricFamily(
        "keepstep_held_up_seconds", "for how long a rank holds up its job", labels=["job", "group", "rank"]
    )
    incidents = CounterMetricFamily(
        "keepstep_incidents", "verdicts on why groups ended, replaced ones too", labels=["job", "verdict"]
    )
    for job in jobs:
        name, quorum, tally, replicas = job.name, job.core.quorum_view(now), job.core.tally, job.core.replicas(now)
        quorum_id.add_metric([name], quorum.quorum_id)
        members.add_metric([name], len(quorum.members))
        step.add_metric([name], quorum.step)
        rounds.add_metric([name], job.rounds)
        waits.add_metric([name], tally.waits.buckets, tally.waits.seconds)
        steps.add_metric([name], job.steps)
        step_seconds.add_metric([name], tally.steps.buckets, tally.steps.seconds)
        of_groups.add_metric([name, "committed"], tally.committed)
        of_groups.add_metric([name, "discarded"], tally.discarded)
        nonfinite.add_metric([name], tally.nonfinite)
        retried.add_metric([name], tally.retried)
        failures.add_metric([name], tally.failures)
        healed.add_metric([name], job.healed_bytes)
        heal_seconds.add_metric([name], job.heals.buckets, job.heals.seconds)
        gaps.add_metric([name], job.commit_gaps.buckets, job.commit_gaps.seconds)
        if shards := sum(replica.member and replica.shards is not None for replica in replicas):
            sharded.add_metric([name], shards)
            exposed.add_metric([name], len(quorum.exposed))
            copies.add_metric([name], quorum.copies_bytes)
            recoveries.add_metric([name], job.recoveries.buckets, job.recoveries.seconds)
        states = Counter(replica.state for replica in replicas)
        for state in ReplicaState:
            groups.add_metric([name, state.value], states[state])
        for replica in {one.name: one for one in replicas if one.state not in UNCOUNTED}.values():  # a name once
            group_step.add_metric([name, replica.name], replica.step)
        for (group, rank), seconds in job.core.held_up().items():
            held_up.add_metric([name, group, str(rank)], seconds)
        for verdict in VERDICTS:
            incidents.add_metric([name, verdict], job.verdicts[verdict])
    yield from (quorum_id, members, step, rounds, waits, steps, step_seconds, of_groups, nonfinite, healed)
    yield from (failures, retried, heal_seconds, gaps, groups, group_step, held_up, incidents)
    yield from (sharded, exposed, copies, recoveries)


def registry(lighthouse: LighthouseNode) -> CollectorRegistry:
    return registry_of("lighthouse", _Lighthouse(lighthouse))
