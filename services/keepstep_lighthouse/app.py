"""One lighthouse as a service: the server in front of its ``LighthouseNode``.

Its duties, in order (``lighthouse_node.py`` has those of a term): open the store, load the jobs, listen. Where several
lighthouses share a store, it listens first, and a term begins when it wins the election. Until then it answers what it
can and forwards to the leader what only the leader knows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

from aiohttp import web

from keepstep_lighthouse.api import prometheus
from keepstep_lighthouse.api.event_stream import EventHandlers
from keepstep_lighthouse.api.routes import routes
from keepstep_lighthouse.jobs.event_copies import PATH as COPIES_PATH
from keepstep_lighthouse.jobs.event_copies import EventCopies
from keepstep_lighthouse.jobs.event_log import EventLog, FiledEventLog, Happened
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.leadership.forwarding import Forwarding
from keepstep_lighthouse.leadership.leader_link import PATH as LINK_PATH
from keepstep_lighthouse.leadership.leader_link import LeaderLink
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_lighthouse.store.contract import OutcomeUnknownError, WriteFailedError
from keepstep_lighthouse.store.opening import store_at
from keepstep_mesh.net.addresses import reachable
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.net.http import Identity, Problem
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.telemetry_records import EventRecord
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.embedded import Embedded
from keepstep_mesh.serving.process import Hosted
from keepstep_mesh.serving.service import Endpoint, Service
from keepstep_mesh.telemetry.record_sender import Sender
from keepstep_mesh.telemetry.tracing.exporting import GOODBYE_SECONDS

MAX_SESSIONS = 20_000

__all__ = ["Lighthouse", "LighthouseSettings"]


class Lighthouse(LighthouseNode, Embedded):
    """A lighthouse. ``start`` and ``stop`` run it within a running event loop; ``service`` is for the command."""

    def __init__(self, settings: LighthouseSettings) -> None:
        path = settings.event_log
        events = EventLog(self._report) if path is None else FiledEventLog(path, self._report)
        LighthouseNode.__init__(self, settings, store_at(settings.store), events)
        Embedded.__init__(self, "lighthouse", settings)
        self._identity = Identity(settings.own_token, settings.peer_tls)
        self._sender = Sender("lighthouse", self.node, self.metrics_address, self._identity, interval=0.1)
        self._forwarding = Forwarding(self.leader_elsewhere, settings.peer_tls)

    def routes(self) -> list[Route]:
        session = Route("GET", "/v1/jobs/{job}/session", self._session, Access.WORKER, "a worker's WebSocket session")
        link = Route("GET", LINK_PATH, self._followed, Access.SERVICE, "another lighthouse's link to this leader")
        copies = Route(
            "GET",
            COPIES_PATH,
            EventHandlers(self).copies,
            Access.SERVICE,
            "a stream of all events for another lighthouse",
        )
        return [session, link, copies, *map(self._forwarding.route, routes(self, self.routes))]

    def service(self) -> Service:
        return Service(
            name="lighthouse",
            routes=self.routes(),
            lifespan=self._lifespan,
            not_ready=self.not_ready,
            listening=self._listens,
            neighbours=self.registry.addresses_by_kind,
            registry=prometheus.registry(self),
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await self.store.open()
            stack.push_async_callback(self.store.close)
            await stack.enter_async_context(self.registry.following(self.store))
            await self.events.open()
            stack.push_async_callback(self.events.close)
            stack.push_async_callback(self._sender.flush, GOODBYE_SECONDS)
            telling = asyncio.create_task(self._sender.run(), name="keepstep lighthouse telemetry")
            stack.push_async_callback(cancelled, telling)
            stack.push_async_callback(self.ports.close)
            expiring = asyncio.create_task(self.endings.run(), name="keepstep lighthouse expiry")
            stack.push_async_callback(cancelled, expiring)
            if self.store.exclusive:
                try:
                    await self.begin_term()
                except (WriteFailedError, OutcomeUnknownError) as error:  # a full disk; ``keep_term`` tries again
                    self._term_is_over(str(error))
            keep = self.keep_term() if self.store.exclusive else self._listen_and_stand_by(LeaderLink(self._identity))
            keeper = asyncio.create_task(keep, name="keepstep lighthouse term")
            trying = asyncio.create_task(self.try_store(), name="keepstep lighthouse store")
            self.serving = True
            try:
                yield
            finally:
                self.serving = False
                await cancelled(trying)
                self.events.notifier.notify_all()
                await cancelled(keeper)

    async def _listen_and_stand_by(self, link: LeaderLink) -> None:
        await self._listening.wait()
        address = self.settings.advertise or reachable(self.address)
        copies = EventCopies(self.events, self._others, self._identity)
        copying = asyncio.create_task(copies.run(), name="keepstep lighthouse event copies")
        try:
            await self.stand_by(address, link)
        finally:
            await cancelled(copying)

    def _others(self) -> set[str]:
        """Return the addresses of the other lighthouses of the store."""
        addresses = {} if self.nodes is None else self.nodes.addresses
        return {address for node, address in addresses.items() if node != self.node} - {addresses.get(self.node)}

    def _report(self, one: Happened) -> None:
        """Send an event to the metrics service, once one is registered."""
        if one.job:
            self._sender.record(
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

    # ---- other lighthouses

    async def _followed(self, request: web.Request) -> web.StreamResponse:
        self.leading()
        return await self.followers.serve(request)

    # ---- sessions

    async def _session(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["job"]
        if (problem := names.problem(name, "job")) is not None:
            raise Problem(HTTPStatus.BAD_REQUEST, problem)
        if await self.leader_elsewhere() is None:
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
