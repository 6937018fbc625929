"""Server-sent events of one job: ``now`` when it changes, each ``event``, and a ``ping`` when nothing else comes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import hdrs, web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.serving.openapi import plain
from keepstep_mesh.serving.rest import MAX_DIGITS
from keepstep_metrics.api import job_views
from keepstep_metrics.history.job import Job
from keepstep_metrics.node import MetricsNode

MAX_STREAMS = 200
NOW_SECONDS = 0.25
"""Between two pictures."""
PING_SECONDS = 10.0
SLOW_STREAM_SECONDS = 30.0
"""Who takes nothing for so long is cut off."""
BATCH = 100


async def stream(metrics: MetricsNode, request: web.Request, name: str | None) -> web.StreamResponse:
    """``name``: of a job, whether it is there yet or not; without one only pings come."""
    news = metrics.news
    if news.streams >= MAX_STREAMS:
        raise Problem(503, f"{MAX_STREAMS} follow already", retry_after=PING_SECONDS)
    known = request.headers.get("Last-Event-ID", "")
    last = metrics.core.last_event
    after = int(known) if known.isdecimal() and len(known) <= MAX_DIGITS else last
    if after > last:
        after = 0  # it knows the events of a service whose data are gone
    answer = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-store"})
    loop = asyncio.get_running_loop()
    news.streams += 1
    try:
        await answer.prepare(request)
        spoken, changes = loop.time(), -1
        while metrics.serving:
            text = ""
            job = metrics.core.jobs.get(name) if name else None
            if job is None and (deleted := metrics.core.deleted.get(name or "")) is not None and deleted.id > after:
                after = deleted.id
                text += _message("event", deleted, after)
            if job is not None:
                for one in _events(job, after):
                    after = one.id
                    text += _message("event", one, one.id)
                if (count := job.changes + metrics.live_changes(job.name)) != changes:
                    changes = count
                    text += _message("now", job_views.now_view(job, metrics.live(job.name), time.time()))
            if not text and loop.time() - spoken >= PING_SECONDS:
                text = _message("ping", {})
            if text:
                async with asyncio.timeout(SLOW_STREAM_SECONDS):
                    await answer.write(text.encode())
                spoken = loop.time()
                await asyncio.sleep(NOW_SECONDS)
            else:
                await news.wait(name or "", min(PING_SECONDS, max(0.01, spoken + PING_SECONDS - loop.time())))
    except (ConnectionError, TimeoutError):
        if request.transport is not None:  # it went, or takes nothing: its connection is of no use any more
            request.transport.abort()
    finally:
        news.streams -= 1
    return answer


def _events(job: Job, after: int) -> list[Any]:
    """Those in memory that are newer."""
    found = []
    for one in reversed(job.events):
        if one.id <= after:
            break
        found.append(one)
    return found[::-1][:BATCH]


def _message(event: str, what: object, number: int | None = None) -> str:
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {event}\ndata: {json.dumps(plain(what))}\n\n"
