"""Server-sent events of one job: ``now`` when it changes, each ``event``, and a ``ping`` when nothing else is sent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from weakref import WeakKeyDictionary

from aiohttp import web

from keepstep_mesh.serving.openapi import json_text
from keepstep_mesh.serving.server_sent_events import last_event_id, message
from keepstep_metrics.api import job_views
from keepstep_metrics.history.events import Event
from keepstep_metrics.history.job import Job
from keepstep_metrics.node import MetricsNode

NOW_SECONDS = 0.25
"""Least time between two ``now`` events."""
GROUPS_AT_ONCE = 250
"""A job of more groups is sent less often: in proportion, so that bytes and work per second stay the same."""
PING_SECONDS = 10.0
MAX_BATCH = 100
"""Events of one write."""


async def stream(metrics: MetricsNode, request: web.Request, name: str | None) -> web.StreamResponse:
    """Stream the job ``name``, which need not exist yet; without a name, pings only."""
    async with metrics.streams.open(request) as opened:
        source, loop = _JobMessages(metrics, name or "", last_event_id(request)), asyncio.get_running_loop()
        sent_at = loop.time()
        while metrics.serving:
            text = source.news()
            if not text and loop.time() - sent_at >= PING_SECONDS:
                text = message("ping", "{}")
            if text:
                await opened.send(text)
                sent_at = loop.time()
                await asyncio.sleep(pause(metrics.core.jobs.get(name or "")))
            else:
                with contextlib.suppress(TimeoutError):
                    await metrics.notifier.wait(name or "", max(sent_at + PING_SECONDS, loop.time() + 0.01))
    return opened.response


class _JobMessages:
    """The messages that one stream has not sent yet."""

    def __init__(self, metrics: MetricsNode, name: str, last_id: int | None) -> None:
        self._metrics = metrics
        self._name = name
        newest = metrics.core.last_event
        self._after = newest if last_id is None else last_id
        """Number of the last event that the client has."""
        if self._after > newest:
            self._after = 0  # the client knows a service whose data are lost
        self._changes = -1

    def news(self) -> str:
        """Return the messages since the last call, the oldest first."""
        core, text = self._metrics.core, ""
        job, deleted = core.jobs.get(self._name), core.deleted.get(self._name)
        if job is None:
            return self._events([deleted]) if deleted is not None and deleted.id > self._after else ""
        text += self._events(_newer(job, self._after))
        if job.changes + self._metrics.live_changes(job.name) != self._changes:
            self._changes, now = now_text(self._metrics, job)
            text += message("now", now)
        return text

    def _events(self, events: list[Event]) -> str:
        if events:
            self._after = events[-1].id
        return "".join(message("event", json_text(one), one.id) for one in events)


def pause(job: Job | None) -> float:
    """Return the least time between two ``now`` events of a job, in seconds."""
    return NOW_SECONDS * max(1.0, len(job.groups) / GROUPS_AT_ONCE if job is not None else 1.0)


def now_text(metrics: MetricsNode, job: Job) -> tuple[int, str]:
    """Return ``now`` of a job as JSON, the same for all streams for a moment, and the number of changes in it."""
    t, live = time.time(), metrics.asker.live(job.name)
    known = _texts.get(job)
    if known is None or not 0 <= t - known[0] < pause(job) / 2:
        changes = job.changes + metrics.live_changes(job.name)
        known = _texts[job] = t, changes, json_text(job_views.now_view(job, live, t))
    return known[1:]


_texts: WeakKeyDictionary[Job, tuple[float, int, str]] = WeakKeyDictionary()
"""When the text of a job was made, the number of changes then, and the text."""


def _newer(job: Job, after: int) -> list[Event]:
    """Return the oldest events in memory with a higher number than ``after``."""
    found: list[Event] = []
    for one in reversed(job.events):
        if one.id <= after:
            break
        found.append(one)
    return found[::-1][:MAX_BATCH]
