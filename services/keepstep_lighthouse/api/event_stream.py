"""The event log over REST: a page of it, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from keepstep_lighthouse.api.lookup import find_job
from keepstep_lighthouse.jobs.event_log import EVERY_JOB, Happened
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_mesh.serving.rest import bad, json_answer, number
from keepstep_mesh.serving.server_sent_events import EventStreams, comment, last_event_id, message

EVENTS_AT_ONCE = 1000
MAX_EVENTS_AT_ONCE = 10_000
MAX_FOLLOWERS = 100
FOLLOWER_BATCH = 100
KEEPALIVE_SECONDS = 15.0
COPIED_AT_ONCE = 500
COPY_PAUSE_SECONDS = 0.1
"""Pause after a batch for another lighthouse, so that the events of a busy moment are sent together."""


@dataclass(frozen=True, slots=True)
class EventsView:
    job: str
    events: tuple[Happened, ...]
    """Oldest first."""
    after: int
    """Pass this number as ``after`` to get the next page."""


class EventHandlers:
    def __init__(self, node: LighthouseNode) -> None:
        self._node = node
        self._streams = EventStreams(MAX_FOLLOWERS)

    async def events(self, request: web.Request) -> web.StreamResponse:
        job = find_job(self._node, request).name
        newest = "after" not in request.query
        after = number(request, "after", 0)
        if request.query.get("follow", "0") not in ("0", "1"):
            raise bad(f"invalid follow {request.query['follow'][:40]!r}: expected 0 or 1")
        if request.query.get("follow") == "1":
            return await self._follow(request, job, after)
        limit, events = min(number(request, "limit", EVENTS_AT_ONCE), MAX_EVENTS_AT_ONCE), self._node.events
        found = tuple(events.newest(job, limit) if newest else events.after(job, after, limit))
        return json_answer(EventsView(job, found, found[-1].id if found else after))

    async def _follow(self, request: web.Request, job: str, after: int) -> web.StreamResponse:
        """Stream entries as they are made. A follower has no queue: a comment tells one that is too slow."""
        if (known := last_event_id(request)) is not None:
            after = known
        events = self._node.events
        async with self._streams.open(request) as stream:
            while self._node.serving:
                has_ended = job not in self._node.jobs
                if batch := events.after(job, after, FOLLOWER_BATCH):
                    text = comment("events before this were missed") if after and events.missed(job, after) else ""
                    text += "".join(message(one.kind, one.json(), one.id) for one in batch)
                    after = batch[-1].id
                elif has_ended:
                    break  # a client that reconnects gets 404
                else:
                    try:
                        await events.notifier.wait(job, asyncio.get_running_loop().time() + KEEPALIVE_SECONDS)
                        continue
                    except TimeoutError:
                        text = comment("nothing new")
                await stream.send(text)
        return stream.response

    async def copies(self, request: web.Request) -> web.StreamResponse:
        """Stream the events of all jobs to another lighthouse: those in memory, then each new one."""
        events, after = self._node.events, number(request, "after", 0)
        loop = asyncio.get_running_loop()
        async with self._streams.open(request) as stream:
            while self._node.serving:
                if batch := events.of_all_jobs_after(after, COPIED_AT_ONCE):
                    after = batch[-1].id
                    await stream.send("".join(message(one.kind, one.json(), one.id) for one in batch))
                    if len(batch) < COPIED_AT_ONCE:
                        await asyncio.sleep(COPY_PAUSE_SECONDS)
                    continue
                try:
                    await events.notifier.wait(EVERY_JOB, loop.time() + KEEPALIVE_SECONDS)
                except TimeoutError:
                    await stream.send(comment("nothing new"))
        return stream.response
