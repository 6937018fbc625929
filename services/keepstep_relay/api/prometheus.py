"""What Prometheus sees of a relay. Most of it is read from the relay when it is scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from keepstep_relay.core.events import State, Tier
from keepstep_relay.node import RelayNode


class _Relay(Collector):
    def __init__(self, relay: RelayNode) -> None:
        self._relay = relay

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        relay, traffic = self._relay, self._relay.traffic
        core, chunks = relay.core, relay.chunks
        yield CounterMetricFamily("keepstep_relay_received_bytes", "chunks taken", traffic.received_bytes)
        yield CounterMetricFamily("keepstep_relay_sent_bytes", "chunks and packs sent", traffic.sent_bytes)
        yield CounterMetricFamily(
            "keepstep_relay_deduplicated_bytes", "needed by uploads and here already", traffic.deduplicated_bytes
        )
        yield GaugeMetricFamily("keepstep_relay_uploads", "chunks on their way in", traffic.uploads)
        yield GaugeMetricFamily("keepstep_relay_downloads", "answers on their way out", traffic.downloads)
        yield GaugeMetricFamily("keepstep_relay_waits", "readers that wait for what is to come", chunks.bells.count)
        yield CounterMetricFamily("keepstep_relay_cut_off", "peers that were too slow", traffic.cut_off)
        damaged = CounterMetricFamily("keepstep_relay_damaged_chunks", "chunks with a wrong digest", labels=["where"])
        for where in ("upload", "disk", "durable"):
            damaged.add_metric([where], chunks.damaged[where])
        yield damaged
        tiers = GaugeMetricFamily("keepstep_relay_tier_bytes", "chunks in each tier", labels=["tier"])
        for tier in Tier:
            tiers.add_metric([tier.value], core.tier_bytes[tier])
        yield tiers
        yield GaugeMetricFamily("keepstep_relay_memory_used_bytes", "held or reserved in memory", chunks.memory.used)
        yield GaugeMetricFamily("keepstep_relay_memory_limit_bytes", "limit of the memory tier", chunks.memory.limit)
        yield CounterMetricFamily("keepstep_relay_evicted_chunks", "taken out of memory for room", chunks.evicted)
        yield GaugeMetricFamily("keepstep_relay_chunks", "different chunks that are known", len(core.chunks))
        checkpoints = GaugeMetricFamily("keepstep_relay_checkpoints", "by state", labels=["state"])
        states = Counter(one.state for one in core.checkpoints.values())
        for state in State:
            checkpoints.add_metric([state.value], states[state])
        yield checkpoints
        yield GaugeMetricFamily(
            "keepstep_relay_disk_trouble",
            "1 while the disk does not take what it is given",
            float(chunks.disk_trouble is not None),
        )
        yield GaugeMetricFamily(
            "keepstep_relay_durable_behind",
            "1 while the durable tier does not take what was committed, or delete what was dropped",
            float(relay.checkpoints.trouble is not None),
        )
        yield GaugeMetricFamily(
            "keepstep_relay_registered", "1 while a lighthouse has the registration", float(relay.is_registered)
        )


def registry(relay: RelayNode) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(_Relay(relay))
    return found
