"""Prometheus metrics of the metrics service and of its jobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from keepstep_mesh.serving.process_metrics import registry_of
from keepstep_metrics.history.findings import goodput
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.timeseries.timeline import LIVING, State
from keepstep_metrics.node import MetricsNode

WINDOW_SECONDS = 300.0
MAX_ENDED_SHOWN = 20
"""Ended jobs with their own series; the most recent ones."""


class _Metrics(Collector):
    def __init__(self, metrics: MetricsNode) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        one = self._metrics
        yield CounterMetricFamily("keepstep_metrics_batches", "accepted batches", one.traffic.batches)
        yield CounterMetricFamily("keepstep_metrics_records", "accepted records", one.traffic.records)
        yield CounterMetricFamily(
            "keepstep_metrics_refused_batches", "batches refused for the disk", one.traffic.refused
        )
        yield CounterMetricFamily(
            "keepstep_metrics_sender_dropped_records", "records that senders dropped", one.core.dropped_total
        )
        yield CounterMetricFamily(
            "keepstep_metrics_left_out_records",
            "records beyond a limit, or from the future",
            one.core.left_out,
        )
        yield GaugeMetricFamily("keepstep_metrics_streams", "open streams of events", one.streams.count)
        yield GaugeMetricFamily(
            "keepstep_metrics_unwritten_bytes", "bytes of batches that wait for the disk", one.store.pending_bytes
        )
        yield GaugeMetricFamily(
            "keepstep_metrics_store_trouble", "1 while writes to disk fail", float(one.store.trouble is not None)
        )
        yield GaugeMetricFamily(
            "keepstep_metrics_registered", "1 while registered with a lighthouse", float(one.is_registered)
        )
        yield from self._jobs()

    def _jobs(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = time.time()
        step = GaugeMetricFamily("keepstep_job_step", "committed steps", labels=["job"])
        training = GaugeMetricFamily(
            "keepstep_job_goodput_ratio", "share of group-seconds in committed steps, over 5 minutes", labels=["job"]
        )
        times = GaugeMetricFamily(
            "keepstep_job_time_ratio", "share of group-seconds in each state, over 5 minutes", labels=["job", "state"]
        )
        groups = GaugeMetricFamily("keepstep_job_groups", "groups by state", labels=["job", "state"])
        seconds = GaugeMetricFamily("keepstep_group_step_seconds", "median of the last steps", labels=["job", "group"])
        slow = GaugeMetricFamily("keepstep_group_straggler", "1 for a straggler", labels=["job", "group"])
        for job in shown(self._metrics.core.jobs.values()):
            name = job.name
            step.add_metric([name], job.step)
            spent = goodput.group_seconds(job, now - WINDOW_SECONDS, now)
            if (share := goodput.ratio(spent)) is not None:
                training.add_metric([name], share)
                for spent_in, part in goodput.shares(spent).items():
                    times.add_metric([name, spent_in], part)
            states = Counter(one.timeline.state for one in job.groups.values())
            for state in (*LIVING, State.STANDBY):
                if state is State.WAITING_SLOW_GROUP:
                    continue  # no group is known to be in it now
                groups.add_metric([name, state.value], states[state])
            for group in job.groups.values():
                if group.is_there and (p50 := group.seconds_p50) is not None:
                    seconds.add_metric([name, group.name], p50)
            for group_name, standing in job.standings.items():
                if group_name in job.groups and job.groups[group_name].is_there:
                    slow.add_metric([name, group_name], float(standing.straggler))
        yield from (step, training, times, groups, seconds, slow)
        yield from _durable(shown(self._metrics.core.jobs.values()), now)


def _durable(jobs: Iterable[Job], now: float) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    step = GaugeMetricFamily(
        "keepstep_job_durable_step", "step of the newest committed durable checkpoint; 0: none", labels=["job"]
    )
    age_steps = GaugeMetricFamily(
        "keepstep_job_durable_age_steps",
        "steps since the newest durable checkpoint, lost if all groups end",
        labels=["job"],
    )
    age_seconds = GaugeMetricFamily(
        "keepstep_job_durable_age_seconds", "seconds since the newest durable checkpoint", labels=["job"]
    )
    every = GaugeMetricFamily(
        "keepstep_job_durable_every_steps",
        "steps between two durable checkpoints; 0: none is due by itself",
        labels=["job"],
    )
    size = GaugeMetricFamily(
        "keepstep_job_durable_bytes", "size of the state of one rank in the newest durable checkpoint", labels=["job"]
    )
    write = GaugeMetricFamily(
        "keepstep_job_durable_write_seconds",
        "seconds from staging copy to commit of the newest durable checkpoint",
        labels=["job"],
    )
    failures = CounterMetricFamily(
        "keepstep_job_durable_failures", "durable checkpoints that were not written", labels=["job"]
    )
    skips = CounterMetricFamily(
        "keepstep_job_durable_skipped",
        "damaged durable checkpoints that the job did not resume from, although they were newer",
        labels=["job"],
    )
    for job in jobs:
        if (one := job.durable) is not None:
            values = (
                (step, one.step),
                (age_steps, one.age_steps(job.step)),
                (age_seconds, max(0.0, now - one.committed_at)),
                (every, one.every),
                (size, one.bytes),
                (write, one.seconds),
                (failures, one.failures),
                (skips, one.skips),
            )
            for family, value in values:
                family.add_metric([job.name], value)
    yield from (step, age_steps, age_seconds, every, size, write, failures, skips)


def shown(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs with their own series: the running ones, and ``MAX_ENDED_SHOWN`` ended ones."""
    last_heard = sorted(jobs, key=lambda job: job.last_seen, reverse=True)
    ended = [job for job in last_heard if not job.has_groups]
    return [job for job in last_heard if job.has_groups] + ended[:MAX_ENDED_SHOWN]


def registry(metrics: MetricsNode) -> CollectorRegistry:
    return registry_of("metrics", _Metrics(metrics))
