"""The event log over REST: a page of it, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_lighthouse.api.lookup import find_job
from keepstep_lighthouse.jobs.event_log import Happened
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_mesh.net.http import Problem
from keepstep_mesh.serving.rest import MAX_DIGITS, bad, json_answer, number

EVENTS_AT_ONCE = 1000
MAX_EVENTS_AT_ONCE = 10_000
MAX_FOLLOWERS = 100
FOLLOWER_BATCH = 100
KEEPALIVE_SECONDS = 15.0
SLOW_FOLLOWER_SECONDS = 30.0
"""The stream of a follower that reads nothing for so long is aborted."""


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
        self._followers = 0

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
        if self._followers >= MAX_FOLLOWERS:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"too many followers of the event log (limit {MAX_FOLLOWERS})"
            )
        if known := request.headers.get("Last-Event-ID", ""):
            after = int(known) if known.isdecimal() and len(known) <= MAX_DIGITS else after
        stream = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-store"})
        events = self._node.events
        self._followers += 1
        try:
            await stream.prepare(request)
            while self._node.serving:
                has_ended = job not in self._node.jobs
                if batch := events.after(job, after, FOLLOWER_BATCH):
                    text = ": events before this were missed\n\n" if after and events.missed(job, after) else ""
                    text += "".join(f"id: {one.id}\nevent: {one.kind}\ndata: {one.json()}\n\n" for one in batch)
                    after = batch[-1].id
                elif has_ended:
                    break  # a client that reconnects gets 404
                else:
                    text = ""
                    try:
                        async with asyncio.timeout(KEEPALIVE_SECONDS):
                            await events.news(job).wait()
                        continue
                    except TimeoutError:
                        text = ": nothing new\n\n"
                async with asyncio.timeout(SLOW_FOLLOWER_SECONDS):
                    await stream.write(text.encode())
        except (ConnectionError, TimeoutError):
            # The follower disconnected, or does not read.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._followers -= 1
        return stream
