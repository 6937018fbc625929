"""Prometheus metrics that every service has: of its process and of its release.

Only services import this module, because only they have ``prometheus_client``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class _BuildInfo(Collector):
    def __init__(self, service: str) -> None:
        self._labels = [service, version("keepstep"), platform.python_version()]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        info = GaugeMetricFamily("keepstep_build_info", "always 1", labels=["service", "version", "python"])
        info.add_metric(self._labels, 1)
        yield info


class CertificateEnd(Collector):
    """``ends_at`` returns the end of the certificate in use, in Unix seconds; None: unknown."""

    def __init__(self, ends_at: Callable[[], float | None]) -> None:
        self._ends_at = ends_at

    def collect(self) -> Iterator[GaugeMetricFamily]:
        end = GaugeMetricFamily(
            "keepstep_certificate_end_timestamp_seconds",
            "when the TLS certificate of the service ends, in Unix seconds; only with TLS",
        )
        if (at := self._ends_at()) is not None:
            end.add_metric([], at)
        yield end


def registry_of(service: str, collector: Collector) -> CollectorRegistry:
    """Return a registry of ``collector``, the build info, and the metrics of the process (``process_*``, on Linux)."""
    found = CollectorRegistry()
    found.register(collector)
    found.register(_BuildInfo(service))
    ProcessCollector(registry=found)
    return found
