"""What Prometheus sees of the metrics service, and of the jobs that it knows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from keepstep_metrics.history import goodput
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.timeline import LIVING
from keepstep_metrics.node import MetricsNode

WINDOW_SECONDS = 300.0
MAX_ENDED_SHOWN = 20
"""Jobs without a group that have lines of their own, the last heard of."""


class _Metrics(Collector):
    def __init__(self, metrics: MetricsNode) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        one = self._metrics
        yield CounterMetricFamily("keepstep_metrics_batches", "batches taken", one.traffic.batches)
        yield CounterMetricFamily("keepstep_metrics_records", "records taken", one.traffic.records)
        yield CounterMetricFamily("keepstep_metrics_refused_batches", "not taken, for the disk", one.traffic.refused)
        yield CounterMetricFamily(
            "keepstep_metrics_sender_dropped_records", "dropped by senders", one.core.dropped_total
        )
        yield CounterMetricFamily(
            "keepstep_metrics_left_out_records", "of one job or group too many, or of the future", one.core.left_out
        )
        yield GaugeMetricFamily("keepstep_metrics_streams", "open streams of events", one.news.streams)
        yield GaugeMetricFamily(
            "keepstep_metrics_unwritten_bytes", "batches that wait for the disk", one.store.pending_bytes
        )
        yield GaugeMetricFamily(
            "keepstep_metrics_store_trouble", "1 while nothing can be written", float(one.store.trouble is not None)
        )
        yield GaugeMetricFamily(
            "keepstep_metrics_registered", "1 while a lighthouse has the registration", float(one.is_registered)
        )
        yield from self._jobs()

    def _jobs(self) -> Iterator[GaugeMetricFamily]:
        now = time.time()
        step = GaugeMetricFamily("keepstep_job_step", "committed steps", labels=["job"])
        training = GaugeMetricFamily(
            "keepstep_job_goodput_ratio", "share of group-seconds that led to commits, over 5 minutes", labels=["job"]
        )
        groups = GaugeMetricFamily("keepstep_job_groups", "groups by state", labels=["job", "state"])
        seconds = GaugeMetricFamily("keepstep_group_step_seconds", "median of its last steps", labels=["job", "group"])
        slow = GaugeMetricFamily("keepstep_group_straggler", "1 for a straggler", labels=["job", "group"])
        for job in shown(self._metrics.core.jobs.values()):
            name = job.name
            step.add_metric([name], job.step)
            if (share := goodput.ratio(goodput.group_seconds(job, now - WINDOW_SECONDS, now))) is not None:
                training.add_metric([name], share)
            states = Counter(one.timeline.state for one in job.groups.values())
            for state in LIVING:
                groups.add_metric([name, state.value], states[state])
            for group in job.groups.values():
                if group.is_there and (p50 := group.seconds_p50) is not None:
                    seconds.add_metric([name, group.name], p50)
            for group_name, standing in job.standings.items():
                if group_name in job.groups and job.groups[group_name].is_there:
                    slow.add_metric([name, group_name], float(standing.straggler))
        yield from (step, training, groups, seconds, slow)


def shown(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that have lines: those at work, and ``MAX_ENDED_SHOWN`` others."""
    last_heard = sorted(jobs, key=lambda job: job.last_seen, reverse=True)
    ended = [job for job in last_heard if not job.has_groups]
    return [job for job in last_heard if job.has_groups] + ended[:MAX_ENDED_SHOWN]


def registry(metrics: MetricsNode) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(_Metrics(metrics))
    return found
