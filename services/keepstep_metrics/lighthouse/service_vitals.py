"""Ask lighthouses and services for their ``/metrics``, for the cluster page: versions, memory, fill and traffic."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import Identity, raise_for_problem, read_answer
from keepstep_mesh.security.request_errors import explained

SCRAPE_SECONDS = 2.0
LEAST_RATE_SECONDS = 1.0
"""Least time between two readings of a rate."""
MAX_SERVICES = 50

log = get_logger("keepstep.metrics.services")


@dataclass(frozen=True, slots=True)
class Vitals:
    """Readings of one service; None: it does not have this one, or has not been asked twice yet."""

    version: str = ""
    python: str = ""
    resident_bytes: float | None = None
    """Memory of its process."""
    started: float | None = None
    """Unix time."""
    used_bytes: float | None = None
    """Memory tier of a relay."""
    limit_bytes: float | None = None
    stored_bytes: float | None = None
    """Of a relay, all tiers."""
    received_per_second: float | None = None
    """Bytes."""
    sent_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """Samples of one scrape: (name) -> sum over labels; ``labels`` of ``keepstep_build_info``."""

    t: float
    sums: Mapping[str, float]
    build: Mapping[str, str]


def reading(text: str, t: float) -> Reading:
    """Parse the text format of Prometheus. Raises ``ValueError``."""
    sums: dict[str, float] = defaultdict(float)
    build: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
            if sample.name == "keepstep_build_info":
                build = dict(sample.labels)
    return Reading(t, dict(sums), build)


def vitals(now: Reading, before: Reading | None) -> Vitals:
    """Return the vitals; rates since ``before``."""

    def rate(name: str) -> float | None:
        if before is None or name not in now.sums or name not in before.sums:
            return None
        return max(0.0, now.sums[name] - before.sums[name]) / max(now.t - before.t, LEAST_RATE_SECONDS)

    return Vitals(
        version=now.build.get("version", ""),
        python=now.build.get("python", ""),
        resident_bytes=now.sums.get("process_resident_memory_bytes"),
        started=now.sums.get("process_start_time_seconds"),
        used_bytes=now.sums.get("keepstep_relay_memory_used_bytes"),
        limit_bytes=now.sums.get("keepstep_relay_memory_limit_bytes"),
        stored_bytes=now.sums.get("keepstep_relay_tier_bytes"),
        received_per_second=rate("keepstep_relay_received_bytes_total"),
        sent_per_second=rate("keepstep_relay_sent_bytes_total"),
    )


class VitalsReader:
    """Keeps the last reading of each service, for rates."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._last: dict[str, Reading] = {}
        self._vitals: dict[str, Vitals] = {}

    async def read(self, services: Iterable[tuple[str, str]]) -> dict[str, Vitals]:
        """Return vitals by address. ``services``: kind and address of each; one that does not answer is left out."""
        asked = [*services][:MAX_SERVICES]
        addresses = {address for _, address in asked}
        self._last = {address: one for address, one in self._last.items() if address in addresses}
        self._vitals = {address: one for address, one in self._vitals.items() if address in addresses}
        await asyncio.gather(*(self._read(kind, address) for kind, address in asked))
        return dict(self._vitals)

    async def _read(self, kind: str, address: str) -> None:
        last = self._last.get(address)
        if last is not None and time.time() - last.t < LEAST_RATE_SECONDS:
            return
        headers = {} if kind == "lighthouse" else self._identity.headers_for(kind, address)
        try:
            async with (
                asyncio.timeout(SCRAPE_SECONDS),
                self._identity.session(timeout=SCRAPE_SECONDS) as http,
                http.get(f"{address}/metrics", headers=headers, allow_redirects=False) as answer,
            ):
                await raise_for_problem(answer)
                found = reading((await read_answer(answer)).decode(errors="replace"), time.time())
        except (aiohttp.ClientError, KeepstepError, OSError, TimeoutError, ValueError) as error:
            log.debug("could not read the metrics of a service", address=address, reason=explained(error, address))
            self._vitals.pop(address, None)
            return
        self._vitals[address], self._last[address] = vitals(found, last), found
