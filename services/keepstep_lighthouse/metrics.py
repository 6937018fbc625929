"""What Prometheus sees of a lighthouse. Most of it is read from the lighthouse when it is scraped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from keepstep_lighthouse.views import ReplicaState
from keepstep_mesh.logging import get_logger

if TYPE_CHECKING:
    from keepstep_lighthouse.app import Lighthouse

LOGGED_BAD_MESSAGES = 10
"""Within ``LOGGED_SECONDS``; the others are only counted."""
LOGGED_SECONDS = 10.0

log = get_logger("keepstep.lighthouse")


class BadMessages:
    """Counts the sessions that broke the protocol, and logs some of them."""

    def __init__(self) -> None:
        self.total = 0
        self._window = 0.0
        self._in_window = 0

    def add(self, job: str, replica_id: str, reason: str) -> None:
        self.total += 1
        now = time.monotonic()
        if now >= self._window + LOGGED_SECONDS:
            self._window, self._in_window = now, 0
        self._in_window += 1
        if self._in_window <= LOGGED_BAD_MESSAGES:
            log.warning("bad message", job=job, replica_id=replica_id, reason=reason, bad_messages=self.total)


class _Lighthouse(Collector):
    def __init__(self, lighthouse: Lighthouse) -> None:
        self._lighthouse = lighthouse

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        one = self._lighthouse
        yield GaugeMetricFamily("keepstep_lighthouse_ready", "1 while it may decide", float(one.term is not None))
        yield GaugeMetricFamily(
            "keepstep_lighthouse_epoch", "its term; 0 without one", one.term.epoch if one.term else 0
        )
        yield GaugeMetricFamily("keepstep_lighthouse_sessions", "open connections of workers", len(one.sessions))
        yield GaugeMetricFamily(
            "keepstep_lighthouse_standbys", "lighthouses that stand by for this one", len(one.followers)
        )
        yield CounterMetricFamily(
            "keepstep_lighthouse_bad_messages", "sessions that broke the protocol", one.bad_messages.total
        )
        services = GaugeMetricFamily("keepstep_services", "services that are registered", labels=["kind"])
        for kind, count in Counter(record.kind for record in one.registry.records).items():
            services.add_metric([kind], count)
        yield services
        quorum_id = GaugeMetricFamily("keepstep_quorum_id", "number of the current quorum", labels=["job"])
        members = GaugeMetricFamily("keepstep_quorum_members", "groups in the current quorum", labels=["job"])
        step = GaugeMetricFamily("keepstep_quorum_step", "step of the last announced quorum", labels=["job"])
        rounds = CounterMetricFamily("keepstep_quorum_rounds", "quorums announced and confirmed", labels=["job"])
        groups = GaugeMetricFamily("keepstep_groups", "replica groups by what they do", labels=["job", "state"])
        now = time.monotonic()
        for name, job in one.jobs.items():
            quorum = job.core.quorum_view(now)
            quorum_id.add_metric([name], quorum.quorum_id)
            members.add_metric([name], len(quorum.members))
            step.add_metric([name], quorum.step)
            rounds.add_metric([name], job.rounds)
            states = Counter(replica.state for replica in job.core.replicas(now))
            for state in ReplicaState:
                groups.add_metric([name, state.value], states[state])
        yield from (quorum_id, members, step, rounds, groups)


def registry(lighthouse: Lighthouse) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(_Lighthouse(lighthouse))
    return found
