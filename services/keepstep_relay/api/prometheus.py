"""Prometheus metrics of a relay, read from it at each scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from keepstep_mesh.serving.process_metrics import registry_of
from keepstep_relay.checkpoint_store import newest_durable
from keepstep_relay.core.events import State, Tier
from keepstep_relay.node import RelayNode


class _Relay(Collector):
    def __init__(self, relay: RelayNode) -> None:
        self._relay = relay

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        relay, traffic = self._relay, self._relay.traffic
        core, chunks = relay.core, relay.chunks
        yield CounterMetricFamily("keepstep_relay_received_bytes", "bytes of received chunks", traffic.received_bytes)
        yield CounterMetricFamily("keepstep_relay_sent_bytes", "bytes of sent chunks and packs", traffic.sent_bytes)
        yield CounterMetricFamily(
            "keepstep_relay_deduplicated_bytes", "bytes of uploads that were already here", traffic.deduplicated_bytes
        )
        yield GaugeMetricFamily("keepstep_relay_uploads", "uploads of chunks in progress", traffic.uploads)
        yield GaugeMetricFamily("keepstep_relay_downloads", "downloads in progress", traffic.downloads)
        yield GaugeMetricFamily(
            "keepstep_relay_waits", "readers that wait for chunks or manifests", chunks.notifier.waiters
        )
        yield CounterMetricFamily(
            "keepstep_relay_cut_off", "connections of slow peers that were closed", traffic.cut_off
        )
        damaged = CounterMetricFamily(
            "keepstep_relay_damaged_chunks", "chunks with a wrong digest, or that a disk cannot read", labels=["where"]
        )
        for where in ("upload", "disk", "durable"):
            damaged.add_metric([where], chunks.damaged[where])
        yield damaged
        tiers = GaugeMetricFamily("keepstep_relay_tier_bytes", "bytes of chunks, by tier", labels=["tier"])
        for tier in Tier:
            tiers.add_metric([tier.value], core.inventory.tier_bytes[tier])
        yield tiers
        yield GaugeMetricFamily("keepstep_relay_memory_used_bytes", "bytes in use or reserved", chunks.memory.used)
        yield GaugeMetricFamily("keepstep_relay_memory_limit_bytes", "limit of the memory tier", chunks.memory.limit)
        yield CounterMetricFamily("keepstep_relay_evicted_chunks", "chunks evicted from memory", chunks.evicted)
        yield GaugeMetricFamily("keepstep_relay_chunks", "distinct known chunks", len(core.inventory.chunks))
        checkpoints = GaugeMetricFamily("keepstep_relay_checkpoints", "checkpoints, by state", labels=["state"])
        states = Counter(one.state for one in core.checkpoints.values())
        for state in State:
            checkpoints.add_metric([state.value], states[state])
        yield checkpoints
        yield GaugeMetricFamily(
            "keepstep_relay_disk_trouble",
            "1 while writes to disk fail",
            float((chunks.disk_trouble or chunks.tried_disk) is not None),
        )
        yield GaugeMetricFamily(
            "keepstep_relay_durable_behind",
            "1 while copies or deletions in the durable tier fail",
            float(relay.checkpoints.copies.trouble is not None),
        )
        since = relay.checkpoints.copies.behind_since
        yield GaugeMetricFamily(
            "keepstep_relay_durable_behind_seconds",
            "time since the durable tier began to fail; 0: it works",
            0.0 if since is None else max(0.0, time.time() - since),
        )
        yield from self._durable_by_job()
        yield GaugeMetricFamily(
            "keepstep_relay_damaged_checkpoints",
            "durable checkpoints that cannot be loaded: a record, a manifest, or chunks are damaged or missing",
            relay.checkpoints.damaged,
        )
        yield CounterMetricFamily(
            "keepstep_relay_failed_durable_uploads",
            "uploads of durable checkpoints that ended without a commit",
            traffic.failed_durable_uploads,
        )
        yield GaugeMetricFamily(
            "keepstep_relay_processes", "processes that serve the port, see --processes", relay.processes
        )
        yield GaugeMetricFamily(
            "keepstep_relay_registered", "1 while registered with a lighthouse", float(relay.is_registered)
        )

    def _durable_by_job(self) -> Iterator[GaugeMetricFamily]:
        times = GaugeMetricFamily(
            "keepstep_relay_durable_commit_time_seconds",
            "Unix time of the last durable commit of the Manager of a job",
            labels=["job"],
        )
        steps = GaugeMetricFamily("keepstep_relay_durable_commit_step", "step of that checkpoint", labels=["job"])
        for job, one in newest_durable(self._relay.checkpoints).items():
            times.add_metric([job], one.committed or 0.0)
            steps.add_metric([job], one.facts.step)
        yield times
        yield steps


def registry(relay: RelayNode) -> CollectorRegistry:
    return registry_of("relay", _Relay(relay))
