"""One lighthouse as a service: the server in front of its ``LighthouseNode``.

Its duties, in order (``lighthouse_node.py`` has those of a term): open the store, load the jobs, listen. Where several
lighthouses share a store, it listens first, and a term begins when it wins the election. Until then it answers what it
can and forwards to the leader what only the leader knows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from http import HTTPStatus

from aiohttp import web

from keepstep_lighthouse.api import prometheus
from keepstep_lighthouse.api.routes import routes
from keepstep_lighthouse.jobs.event_log import FiledEventLog, Happened
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode, cancelled
from keepstep_lighthouse.leadership.forwarding import pass_on
from keepstep_lighthouse.leadership.leader_link import PATH as LINK_PATH
from keepstep_lighthouse.leadership.leader_link import LeaderLink
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_lighthouse.store.opening import open_store
from keepstep_mesh.net.addresses import reachable
from keepstep_mesh.net.http import Handler, Identity, Problem, Route
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.telemetry_records import EventRecord
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.embedded import Embedded
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint, Service
from keepstep_mesh.telemetry.record_sender import Sender

MAX_SESSIONS = 20_000
EVENT_BATCH_SECONDS = 0.1
"""Pause between two batches of events for the metrics service."""
GOODBYE_SECONDS = 1.0
"""Time limit of the last batch."""
CLUSTER_PATH, OPENAPI_PATH = "/v1/cluster", "/openapi.json"
"""Paths that every lighthouse answers itself."""

__all__ = ["Lighthouse", "LighthouseSettings"]


class Lighthouse(LighthouseNode, Embedded):
    """A lighthouse. ``start`` and ``stop`` run it within a running event loop; ``service`` is for the command."""

    def __init__(self, settings: LighthouseSettings) -> None:
        LighthouseNode.__init__(self, settings)
        Embedded.__init__(self, "lighthouse", settings)
        self._identity: Identity
        """For links to other lighthouses; ``_asker``, without a token, for requests that are forwarded to them."""
        self._asker: Identity

    def routes(self) -> list[Route]:
        session = Route("GET", "/v1/jobs/{job}/session", self._session, Access.WORKER, "a worker's WebSocket session")
        link = Route("GET", LINK_PATH, self._followed, Access.SERVICE, "another lighthouse's link to this leader")
        passed_on = (replace(one, handler=self._led(one.handler)) for one in routes(self, self.routes))
        return [session, link, *passed_on]

    def service(self) -> Service:
        return Service(
            name="lighthouse",
            routes=self.routes(),
            lifespan=self._lifespan,
            not_ready=self.not_ready,
            listening=self._listens,
            registry=prometheus.registry(self),
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            self.store = await open_store(self.settings.store)
            stack.push_async_callback(self.store.close)
            await stack.enter_async_context(self.registry.following(self.store))
            if self.settings.event_log is not None:
                self.events = await FiledEventLog.open(self.settings.event_log)
            stack.push_async_callback(self.events.close)
            sender = self._telemetry()
            stack.push_async_callback(sender.flush, GOODBYE_SECONDS)
            telling = asyncio.create_task(sender.run(), name="keepstep lighthouse telemetry")
            stack.push_async_callback(cancelled, telling)
            expiring = asyncio.create_task(self.endings.run(), name="keepstep lighthouse expiry")
            stack.push_async_callback(cancelled, expiring)
            if self.store.exclusive:
                await self.begin_term()
            else:
                self._identity = Identity(self.settings.own_token, self.settings.peer_tls)
                self._asker = Identity(None, self.settings.peer_tls)
            keep = self.keep_term if self.store.exclusive else self._listen_and_stand_by
            keeper = asyncio.create_task(keep(), name="keepstep lighthouse term")
            self.serving = True
            try:
                yield
            finally:
                self.serving = False
                self.events.wake()
                await cancelled(keeper)

    def _telemetry(self) -> Sender:
        """Send the event log to the metrics service, once one is registered."""
        identity = Identity(self.settings.own_token, self.settings.peer_tls)
        sender = Sender("lighthouse", self.node, self.metrics_address, identity, interval=EVENT_BATCH_SECONDS)

        def tell(one: Happened) -> None:
            if one.job:
                sender.record(
                    EventRecord(
                        t=one.time,
                        id=one.id,
                        job=one.job,
                        event=one.kind,
                        replica_id=one.replica_id,
                        epoch=one.epoch,
                        detail=one.detail,
                    )
                )

        self.events.on_event = tell
        return sender

    async def _listen_and_stand_by(self) -> None:
        await self._listening.wait()
        address = self.settings.advertise or reachable(self.address)
        await self.stand_by(address, LeaderLink(self._identity))

    # ---- other lighthouses

    def _led(self, handler: Handler) -> Handler:
        """Wrap a handler that needs the leader: a follower forwards the request."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if request.path not in (CLUSTER_PATH, OPENAPI_PATH):
                await self.election_over()
                if (leader := self.leader_elsewhere()) is not None:
                    return await pass_on(request, leader, self._asker)
            return await handler(request)

        return handle

    async def _followed(self, request: web.Request) -> web.StreamResponse:
        self.leading()
        return await self.followers.serve(request)

    # ---- sessions

    async def _session(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["job"]
        if (problem := names.problem(name, "job")) is not None:
            raise Problem(HTTPStatus.BAD_REQUEST, problem)
        await self.election_over()
        if self.leader_elsewhere() is None:
            self.leading()
        if len(self.sessions) >= MAX_SESSIONS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"too many sessions (limit {MAX_SESSIONS})")
        session = self.new_session(name)
        response = await session.accept(request)
        self.add_session(session)
        await session.ended()
        return response


def hosted_lighthouse(settings: LighthouseSettings, started: Callable[[Endpoint], None]) -> Hosted:
    """Return the service for ``run_services``, which calls ``started`` with the address on which it listens."""
    return Hosted(lambda: Lighthouse(settings).service(), settings, started)
