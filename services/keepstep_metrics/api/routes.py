"""The metrics service over HTTP: batches in, JSON out, and a stream of changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.protocol.telemetry_records import read_batch
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving import openapi
from keepstep_mesh.serving.application import Route, read_whole
from keepstep_mesh.serving.openapi import Shape
from keepstep_mesh.serving.rest import bad, json_answer, known_names, number
from keepstep_metrics.api import dashboard_page, job_views, log_views, span_views
from keepstep_metrics.api.stream import stream
from keepstep_metrics.api.turns import long_answer
from keepstep_metrics.history.events import MAX_INTEGER
from keepstep_metrics.history.findings import marks, straggler_view
from keepstep_metrics.history.job import Job
from keepstep_metrics.lighthouse.live_status import StateOfJob
from keepstep_metrics.lighthouse.service_vitals import Vitals
from keepstep_metrics.node import MetricsNode
from keepstep_metrics.settings import DAY
from keepstep_metrics.storage.event_store import StoreError

HOUR = 3600.0
MAX_POINTS = 5000
POINTS = 500
LIMIT, MAX_LIMIT = 200, 2000
MAX_GROUPS_ASKED = 20
WRITE_SECONDS = 10.0
WRITE_RETRY_AFTER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Taken:
    accepted: int
    """Number of new records."""
    last: int
    """Number of the last stored record of the sender."""
    received: float
    """Unix time of the request here; with ``answered``, the sender measures the offset of its clock."""
    answered: float


@dataclass(frozen=True, slots=True)
class LighthouseView:
    address: str
    leader: bool
    epoch: int
    trouble: str | None
    vitals: Vitals | None
    """None: it did not answer."""


@dataclass(frozen=True, slots=True)
class ServiceView:
    kind: str
    name: str
    address: str
    since: float
    details: dict[str, Any]
    vitals: Vitals | None
    """None: it did not answer."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    lighthouses: tuple[LighthouseView, ...]
    services: tuple[ServiceView, ...]
    store: str
    store_trouble: str | None
    store_seconds: float | None
    """Time of the lighthouse's last read of its store; None: it failed."""
    states: dict[str, StateOfJob]
    """By job, as the lighthouse sees it."""


@dataclass(frozen=True, slots=True)
class OrderBody:
    reason: str


SPAN = {
    "since": "Unix seconds; default: an hour before until",
    "until": "Unix seconds; default: now",
}
PIXELS = {"points": f"resolution, up to {MAX_POINTS}; default: {POINTS}"}
JOB, ONE = "/v1/jobs/{job}", "/v1/jobs/{job}/replicas/{name}"
SHAPES = {
    "POST /v1/ingest": Shape(Taken, takes_bytes=True),
    "GET /v1/jobs": Shape(job_views.JobsView),
    f"GET {JOB}/now": Shape(job_views.NowView),
    f"GET {JOB}/timeline": Shape(span_views.TimelineView, query=SPAN | PIXELS),
    f"GET {JOB}/steps": Shape(
        span_views.StepsView,
        query=SPAN
        | PIXELS
        | {
            "group": "name of a group with columns of its own, up to 20 times; "
            "default: every group, if the job has at most 8"
        },
    ),
    f"GET {JOB}/goodput": Shape(span_views.GoodputView, query=SPAN),
    f"GET {JOB}/stragglers": Shape(straggler_view.StragglersView),
    f"GET {JOB}/transfers": Shape(log_views.TransfersView),
    f"GET {JOB}/failures": Shape(log_views.FailuresView, query={"limit": f"maximum number; default: {LIMIT}"}),
    f"GET {JOB}/events": Shape(
        log_views.EventsView,
        query={
            "since_id": "number of the last event that the client has; default: answer the newest",
            "limit": f"maximum number of events, up to {MAX_LIMIT}; default: {LIMIT}",
        },
    ),
    f"GET {JOB}/incidents": Shape(
        log_views.IncidentsView,
        query=SPAN | {"limit": f"maximum number of events in them, up to {MAX_LIMIT}; default: {LIMIT}"},
    ),
    f"GET {JOB}": Shape(None),
    f"PATCH {JOB}": Shape(None, status=202, body=Policy),
    f"POST {JOB}/verify": Shape(None, status=202),
    f"POST {ONE}/readmit": Shape(None, status=202),
    "GET /v1/cluster": Shape(ClusterView),
    f"POST {ONE}/evict": Shape(None, status=202, body=OrderBody),
    f"POST {ONE}/drain": Shape(None, status=202, body=OrderBody),
    f"POST {ONE}/replace": Shape(None, status=202, body=OrderBody),
    **dashboard_page.SHAPES,
}


def routes(metrics: MetricsNode, all_routes: Callable[[], list[Route]]) -> list[Route]:
    """``all_routes`` returns the routes that ``/openapi.json`` describes."""
    here = _Api(metrics, all_routes)
    return [
        Route("GET", "/openapi.json", here.openapi, Access.OPEN, "this description"),
        Route("POST", "/v1/ingest", here.ingest, Access.READ, "accept a batch of records, as msgpack"),
        Route("GET", "/v1/jobs", here.jobs, Access.READ, "jobs of the last day"),
        Route("GET", f"{JOB}/now", here.now, Access.READ, "the quorum, and the state of each group"),
        Route("GET", f"{JOB}/timeline", here.timeline, Access.READ, "the state of each group over time"),
        Route("GET", f"{JOB}/steps", here.steps, Access.READ, "steps, step times and recorded values over time"),
        Route(
            "GET", f"{JOB}/goodput", here.goodput, Access.READ, "share of time in committed steps, and in other states"
        ),
        Route("GET", f"{JOB}/stragglers", here.stragglers, Access.READ, "distance of each group from the median"),
        Route("GET", f"{JOB}/transfers", here.transfers, Access.READ, "heals and uploads, newest first"),
        Route("GET", f"{JOB}/failures", here.failures, Access.READ, "failures and recoveries, and why groups ended"),
        Route("GET", f"{JOB}/events", here.events, Access.READ, "the event log, with sentences"),
        Route("GET", f"{JOB}/incidents", here.incidents, Access.READ, "events, those of one failure together"),
        Route("GET", JOB, here.pass_on, Access.READ, "policy and bans (forwarded to the lighthouse)"),
        Route("PATCH", JOB, here.pass_on, Access.ADMIN, "change the policy (forwarded to the lighthouse)"),
        Route("POST", f"{JOB}/verify", here.pass_on, Access.ADMIN, "compare weights (forwarded)"),
        Route("POST", f"{ONE}/readmit", here.pass_on, Access.ADMIN, "lift bans and evictions (forwarded)"),
        Route("POST", f"{ONE}/evict", here.pass_on, Access.ADMIN, "evict a group (forwarded to the lighthouse)"),
        Route("POST", f"{ONE}/drain", here.pass_on, Access.ADMIN, "drain a group (forwarded to the lighthouse)"),
        Route("POST", f"{ONE}/replace", here.pass_on, Access.ADMIN, "let a spare take a place (forwarded)"),
        Route("GET", "/v1/cluster", here.cluster, Access.READ, "lighthouses, services and store"),
        Route("GET", "/v1/stream", here.stream, Access.READ, "server-sent events: now, event, ping"),
        *dashboard_page.routes(),
    ]


class _Api:
    def __init__(self, metrics: MetricsNode, all_routes: Callable[[], list[Route]]) -> None:
        self._metrics = metrics
        self._all_routes = all_routes

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.json_response(openapi.describe("keepstep metrics", self._all_routes(), SHAPES))

    # ---- in

    async def ingest(self, request: web.Request) -> web.Response:
        metrics = self._metrics
        if metrics.store.is_full:
            metrics.traffic.refused += 1
            reason = metrics.store.trouble or "too many batches wait for the disk; retry"
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after=WRITE_RETRY_AFTER_SECONDS)
        body, received = await read_whole(request), time.time()
        try:
            batch = read_batch(body)
        except ValueError as error:
            raise bad(str(error)) from error
        async with metrics.applying:
            taken = metrics.take(batch, body)
        try:
            await metrics.store.written(WRITE_SECONDS)
        except StoreError as error:
            metrics.traffic.refused += 1
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), retry_after=WRITE_RETRY_AFTER_SECONDS) from error
        return json_answer(Taken(taken, batch.head.first + len(batch.records) - 1, received, time.time()))

    # ---- out

    async def jobs(self, _request: web.Request) -> web.Response:
        return await long_answer(job_views.jobs_view(self._metrics.core.jobs.values(), time.time()))

    async def now(self, request: web.Request) -> web.Response:
        job = self._job(request)
        return json_answer(job_views.now_view(job, self._metrics.asker.live(job.name), time.time()))

    async def timeline(self, request: web.Request) -> web.Response:
        return await long_answer(span_views.timeline(self._job(request), *_span(request), _points(request)))

    async def steps(self, request: web.Request) -> web.Response:
        job, (since, until) = self._job(request), _span(request)
        marked = await self._metrics.store.events_between(job.name, since, until, MAX_LIMIT, marks.KINDS)
        names = request.query.getall("group", ())
        if len(names) > MAX_GROUPS_ASKED:
            raise bad(f"too many groups: {len(names)} (limit {MAX_GROUPS_ASKED})")
        return json_answer(span_views.steps(job, since, until, _points(request), time.time(), marked, names))

    async def goodput(self, request: web.Request) -> web.Response:
        return await long_answer(span_views.goodput(self._job(request), *_span(request)))

    async def stragglers(self, request: web.Request) -> web.Response:
        return json_answer(straggler_view.stragglers_view(self._job(request)))

    async def transfers(self, request: web.Request) -> web.Response:
        job = self._job(request)
        return json_answer(log_views.transfers(job, self._metrics.asker.live(job.name)))

    async def failures(self, request: web.Request) -> web.Response:
        job, limit, now = self._job(request), number(request, "limit", LIMIT), time.time()
        ends = await self._metrics.store.events_between(job.name, now - DAY, now, MAX_LIMIT, ("incident",))
        return json_answer(log_views.failures(job, limit, ends))

    async def events(self, request: web.Request) -> web.Response:
        job, limit = request.match_info["job"], min(number(request, "limit", LIMIT), MAX_LIMIT)
        if "since_id" in request.query:
            found = await self._metrics.store.events(job, min(number(request, "since_id", 0), MAX_INTEGER), limit)
        else:
            found = await self._metrics.store.newest_events(job, limit)
        if not found:
            self._job(request)  # events outlive the rest of a job
        return json_answer(log_views.EventsView(job, tuple(map(log_views.event_view, found))))

    async def incidents(self, request: web.Request) -> web.Response:
        job, (since, until) = self._job(request), _span(request)
        limit = min(number(request, "limit", LIMIT), MAX_LIMIT)
        found = await self._metrics.store.events_between(job.name, since, until, limit)
        return json_answer(log_views.incidents(job.name, found))

    async def cluster(self, _request: web.Request) -> web.Response:
        found, jobs, vitals = await self._metrics.asker.cluster()
        return json_answer(
            ClusterView(
                tuple(
                    LighthouseView(
                        one["address"], one["leads"], one["epoch"], one["trouble"], vitals.get(one["address"])
                    )
                    for one in found["nodes"]
                ),
                tuple(
                    ServiceView(
                        *(one["kind"], one["name"], one["address"], one["since"], one["details"]),
                        vitals.get(one["address"]),
                    )
                    for one in found["services"]
                ),
                found["store"]["kind"],
                found["store"]["trouble"],
                found["store"].get("read_seconds"),
                {one["job"]: state for one in jobs if (state := StateOfJob.of(one)) is not None},
            )
        )

    async def pass_on(self, request: web.Request) -> web.Response:
        return await self._metrics.asker.pass_on(request)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        job = request.query.get("job")
        return await stream(self._metrics, request, job)

    def _job(self, request: web.Request) -> Job:
        name, jobs = request.match_info["job"], self._metrics.core.jobs
        if (job := jobs.get(name)) is None:
            detail = f"job {name[:80]!r} not found; {known_names('jobs', sorted(jobs))}"
            raise Problem(HTTPStatus.NOT_FOUND, detail)
        return job


def _span(request: web.Request) -> tuple[float, float]:
    """Return the requested span, cut at now."""
    now = time.time()
    until = _real(request, "until", now)
    since = _real(request, "since", until - HOUR)
    if not 0 <= since < until:
        raise bad("invalid span: since must be before until")
    return since, max(since, min(until, now))


def _points(request: web.Request) -> int:
    return min(max(number(request, "points", POINTS), 1), MAX_POINTS)


def _real(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e11:
        raise bad(f"invalid {name} {text[:40]!r}: expected Unix seconds")
    return value
