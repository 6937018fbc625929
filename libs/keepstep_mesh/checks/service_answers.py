"""Ask a service or a group how it is: its kind, its clock, and the rate of requests of many bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

CLOCK_SAMPLES = 5
PADDING = {f"Keepstep-Padding-{number}": "x" * 6000 for number in range(3)}
"""Headers of a request that is larger than two packets of 9000 bytes."""
PADDED_REQUESTS = 16
"""Requests with ``PADDING`` that are sent at once, to measure a rate."""


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """The fastest of some answers."""

    service: str
    """Kind that it reports; empty: another program."""
    round_trip: float
    clock_offset: float | None
    """Its clock minus ours, seconds; None: it does not tell its time."""


async def healthz(
    http: aiohttp.ClientSession, address: str, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the JSON object; empty for any other answer."""
    async with http.get(f"{address}/healthz", headers=headers, allow_redirects=False) as answer:
        if answer.content_type != "application/json":
            return {}
        body = await answer.json()
        return body if isinstance(body, dict) else {}


async def fastest_answer(http: aiohttp.ClientSession, address: str) -> ServiceAnswer:
    """Ask a service some times for its kind and clock. Raises what ``http`` raises."""
    best: ServiceAnswer | None = None
    for _ in range(CLOCK_SAMPLES):
        sent, began = time.time(), time.monotonic()
        answer = await healthz(http, address)
        trip = time.monotonic() - began
        if best is None or trip < best.round_trip:
            told = answer.get("time")
            offset = told - (sent + trip / 2) if isinstance(told, int | float) else None
            best = ServiceAnswer(str(answer.get("service", "")), trip, offset)
    assert best is not None
    return best


async def request_rate(http: aiohttp.ClientSession, address: str) -> float:
    """Return the bytes per second of many padded requests at once. A lower bound. Raises what ``http`` raises."""
    began = time.monotonic()
    await asyncio.gather(*(healthz(http, address, PADDING) for _ in range(PADDED_REQUESTS)))
    sent = PADDED_REQUESTS * sum(len(name) + len(value) for name, value in PADDING.items())
    return sent / max(time.monotonic() - began, 1e-6)
