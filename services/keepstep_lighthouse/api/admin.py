"""REST over a lighthouse: what people and tools may ask and order.

Reads answer from memory. Orders are carried out like every other event: written first, then answered, 202 with the
entry of the event log that they made and a sentence that says what was done. An order that changes nothing because it
was carried out before says so, with the entry of that time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeVar

from aiohttp import hdrs, web

from keepstep_lighthouse.api import cluster
from keepstep_lighthouse.api.bodies import DrainBody, EvictBody, ReadmitBody, ServiceBody, StragglerBody, VerifyBody
from keepstep_lighthouse.api.cluster import ClusterView
from keepstep_lighthouse.jobs.event_log import Happened
from keepstep_lighthouse.jobs.expiry import NEVER, due_at
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.leadership.term import TermOverError
from keepstep_lighthouse.quorum import bans
from keepstep_lighthouse.quorum.events import (
    Ban,
    DrainOrdered,
    Event,
    EvictOrdered,
    Policy,
    PolicyOrdered,
    ReadmitOrdered,
    StragglerFound,
    VerifyOrdered,
)
from keepstep_lighthouse.quorum.policies import MAX_STEPS, policy_problem
from keepstep_lighthouse.quorum.views import HealView, QuorumView, ReplicaState, ReplicaView
from keepstep_lighthouse.registry import service_records
from keepstep_lighthouse.registry.service_records import ServiceRecord
from keepstep_lighthouse.registry.service_registry import new_record
from keepstep_lighthouse.store.contract import StoreError
from keepstep_mesh.net.http import CALLER, Problem, Route, read_json
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving import openapi
from keepstep_mesh.serving.openapi import Shape
from keepstep_mesh.serving.rest import MAX_DIGITS, MAX_NAMED, bad, checked, json_answer, number, read_body, those
from keepstep_mesh.text import listed

T = TypeVar("T")

EVENTS_AT_ONCE = 1000
MAX_EVENTS_AT_ONCE = 10_000
MAX_FOLLOWERS = 100
FOLLOWER_BATCH = 100
SIGN_OF_LIFE_SECONDS = 15.0
SLOW_FOLLOWER_SECONDS = 30.0
"""A follower that takes nothing for so long is cut off."""
MAX_REASON = 1000
MIN_INCARNATION_CHARACTERS = 8
"""Of what stands behind the colon; less is not taken for the beginning of an incarnation."""
MAX_BAN_SECONDS = 10 * 365 * 86400.0


@dataclass(frozen=True, slots=True)
class JobView:
    job: str
    policy: Policy
    quorum_id: int
    members: int
    asking: int
    healthy: int
    joiners: int
    sessions: int
    bans: tuple[Ban, ...]
    """Those that hold now."""
    evicted: tuple[str, ...]
    expires_in_seconds: float | None
    """When the job is deleted unless it is used; None: it is in use, or its job_ttl is 0."""


@dataclass(frozen=True, slots=True)
class JobsView:
    jobs: tuple[JobView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumStatus(QuorumView):
    job: str
    epoch: int
    age_seconds: float | None
    """Of the quorum_id; None before the first."""


@dataclass(frozen=True, slots=True)
class ReplicasView:
    job: str
    replicas: tuple[ReplicaView, ...]


@dataclass(frozen=True, slots=True)
class TransfersView:
    job: str
    heals: tuple[HealView, ...]
    """Under way, sorted by replica_id."""


@dataclass(frozen=True, slots=True)
class EventsView:
    job: str
    events: tuple[Happened, ...]
    """Oldest first."""
    after: int
    """Ask with this number for those that follow."""


@dataclass(frozen=True, slots=True)
class OrderAnswer(Happened):
    """The entry that the order made, or, when there was nothing to do, that of the order which did it before."""

    done: bool
    """False: there was nothing to do."""
    sentence: str
    """What was done, for people."""


@dataclass(frozen=True, slots=True)
class PolicyChange:
    job: str
    policy: Policy
    """As it is now, in force and written."""
    event: Happened | None
    """The change that this order made; None: it was so before."""


SWITCHES_OF_DELETION = {"force": "true: groups that are connected are evicted; otherwise they are a conflict (409)"}
QUERY_OF_EVENTS = {
    "after": "number of the last event that is known; the first newer ones are answered. Not given: the newest",
    "limit": f"how many at most, up to {MAX_EVENTS_AT_ONCE}; {EVENTS_AT_ONCE} unless said",
    "follow": "1: server-sent events, first those that there are, then each as it happens",
}
SHAPES = {
    "GET /": Shape(None, status=302),
    "GET /v1/cluster": Shape(ClusterView),
    "PUT /v1/services/{kind}/{name}": Shape(ServiceRecord, body=ServiceBody),
    "DELETE /v1/services/{kind}/{name}": Shape(None, status=204),
    "GET /v1/jobs": Shape(JobsView),
    "GET /v1/jobs/{job}": Shape(JobView),
    "PATCH /v1/jobs/{job}": Shape(PolicyChange, status=202, body=Policy),
    "DELETE /v1/jobs/{job}": Shape(OrderAnswer, status=202, switches=SWITCHES_OF_DELETION),
    "GET /v1/jobs/{job}/quorum": Shape(QuorumStatus),
    "POST /v1/jobs/{job}/verify": Shape(OrderAnswer, status=202, body=VerifyBody),
    "GET /v1/jobs/{job}/replicas": Shape(ReplicasView),
    "GET /v1/jobs/{job}/replicas/{replica_id}": Shape(ReplicaView),
    "GET /v1/jobs/{job}/transfers": Shape(TransfersView),
    "POST /v1/jobs/{job}/replicas/{replica_id}/evict": Shape(OrderAnswer, status=202, body=EvictBody),
    "POST /v1/jobs/{job}/replicas/{replica_id}/drain": Shape(OrderAnswer, status=202, body=DrainBody),
    "POST /v1/jobs/{job}/replicas/{replica_id}/readmit": Shape(OrderAnswer, status=202, body=ReadmitBody),
    "POST /v1/jobs/{job}/replicas/{replica_id}/straggler": Shape(OrderAnswer, status=202, body=StragglerBody),
    "GET /v1/jobs/{job}/events": Shape(EventsView, query=QUERY_OF_EVENTS),
}


def routes(lighthouse: LighthouseNode, all_routes: Callable[[], list[Route]]) -> list[Route]:
    """``all_routes``: what ``/openapi.json`` describes."""
    here = _Admin(lighthouse, all_routes)
    job, one = "/v1/jobs/{job}", "/v1/jobs/{job}/replicas/{replica_id}"
    service = "/v1/services/{kind}/{name}"
    return [
        Route("GET", "/", here.dashboard, Access.OPEN, "sends a browser on to the dashboard of the metrics service"),
        Route("GET", "/openapi.json", here.openapi, Access.OPEN, "this description"),
        Route("GET", "/v1/cluster", here.cluster, Access.READ, "lighthouses, leader, epoch, services known"),
        Route("PUT", service, here.put_service, Access.SERVICE, "register a service, or renew that"),
        Route("DELETE", service, here.delete_service, Access.SERVICE, "a service goes"),
        Route("GET", "/v1/jobs", here.jobs, Access.READ, "all jobs"),
        Route("GET", job, here.job, Access.READ, "one job: policy, counts, bans"),
        Route("PATCH", job, here.change_policy, Access.ADMIN, "change the fields of the policy that are given"),
        Route("DELETE", job, here.delete_job, Access.ADMIN, "delete a job: its record, policy, bans and event list"),
        Route("GET", f"{job}/quorum", here.quorum, Access.READ, "the quorum, and why the next one is not formed yet"),
        Route("POST", f"{job}/verify", here.verify, Access.ADMIN, "compare the weights of all groups at the next step"),
        Route("GET", f"{job}/replicas", here.replicas, Access.READ, "all groups, those that just went too"),
        Route("GET", one, here.replica, Access.READ, "one group, by stable name or incarnation"),
        Route("GET", f"{job}/transfers", here.transfers, Access.READ, "the heals under way: bytes, rate, time left"),
        Route("POST", f"{one}/evict", here.evict, Access.ADMIN, "end a group; ban_seconds keeps its name out"),
        Route("POST", f"{one}/drain", here.drain, Access.ADMIN, "ask a group to finish its step and leave"),
        Route("POST", f"{one}/readmit", here.readmit, Access.ADMIN, "lift bans and evictions"),
        Route(
            "POST",
            f"{one}/straggler",
            here.straggler,
            Access.SERVICE,
            "a group is slower than the others: it is drained if the policy says so",
            is_order=True,
        ),
        Route("GET", f"{job}/events", here.events, Access.READ, "the event log, or its tail as it grows"),
    ]


class _Admin:
    def __init__(self, lighthouse: LighthouseNode, all_routes: Callable[[], list[Route]]) -> None:
        self._lighthouse = lighthouse
        self._all_routes = all_routes
        self._followers = 0

    # ---- reads

    async def dashboard(self, _request: web.Request) -> web.Response:
        self._lighthouse.leading()
        if (address := self._lighthouse.metrics_address()) is None:
            raise Problem(HTTPStatus.NOT_FOUND, "no metrics service has registered; start one with: keepstep metrics")
        raise web.HTTPFound(f"{address}/")

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.json_response(openapi.describe("keepstep lighthouse", self._all_routes(), SHAPES))

    async def cluster(self, request: web.Request) -> web.Response:
        # The address under which it was reached: the one that it listens on may be every interface.
        try:
            here = str(request.url.origin())
        except ValueError as error:
            raise bad(f"the Host header is no address: {error}") from error
        return json_answer(await cluster.view(self._lighthouse, here))

    async def jobs(self, _request: web.Request) -> web.Response:
        self._lighthouse.leading()
        return json_answer(JobsView(tuple(_job_view(job) for _, job in sorted(self._lighthouse.jobs.items()))))

    async def job(self, request: web.Request) -> web.Response:
        return json_answer(_job_view(self._job(request)))

    async def quorum(self, request: web.Request) -> web.Response:
        job = self._job(request)
        view = job.core.quorum_view(time.monotonic())
        age = time.time() - view.created_ms / 1000 if view.created_ms else None
        known = {field.name: getattr(view, field.name) for field in fields(view)}
        return json_answer(QuorumStatus(**known, job=job.name, epoch=job.term.epoch, age_seconds=age))

    async def replicas(self, request: web.Request) -> web.Response:
        job = self._job(request)
        return json_answer(ReplicasView(job.name, job.core.replicas(time.monotonic())))

    async def replica(self, request: web.Request) -> web.Response:
        job, target = self._target(request)
        matching = _matching(job, target)
        if not matching:
            raise _no_replica(job, target)
        # Of several incarnations the one that counts: here before gone, a member before one that waits, the newest.
        best = min(matching, key=lambda one: (one.state is ReplicaState.GONE, not one.member))
        return json_answer(best)

    async def transfers(self, request: web.Request) -> web.Response:
        job = self._job(request)
        return json_answer(TransfersView(job.name, job.core.heals(time.monotonic())))

    # ---- orders

    async def evict(self, request: web.Request) -> web.Response:
        body = await read_body(request, EvictBody)
        if not 0 <= body.ban_seconds <= MAX_BAN_SECONDS:
            raise bad(f"ban_seconds must be between 0 and {MAX_BAN_SECONDS:.0f}, not {body.ban_seconds!r:.40}")
        job, target = self._target(request)
        matching = _matching(job, target)
        here = [one for one in matching if one.state is not ReplicaState.GONE]
        if not matching and not body.ban_seconds:
            raise _no_replica(job, target)
        order = EvictOrdered(target, _reason(body.reason), body.ban_seconds, _who(request))
        said_before = not here and not body.ban_seconds and target in job.core.record.evicted
        if made := await self._carried_out(job, None if said_before else order, "evicted"):
            gone = f"{made.replica_id} is evicted" if here else f"no group {target} is there now"
            banned = f"; {target} is banned for {body.ban_seconds:g} s" if body.ban_seconds else ""
            return _done(made, gone + banned)
        names = {name_of(one.replica_id) for one in matching}
        names |= {name_of(one) for one in job.core.record.evicted if one == target}
        before = self._latest(job, "evicted", target, *names)
        lifted = self._latest(job, "readmitted", target, *names)
        if before is None or (lifted is not None and lifted.id > before.id):
            raise Problem(HTTPStatus.CONFLICT, f"{target} is gone; ban_seconds would keep it out")
        return _nothing(before, f"{target} is gone, and was evicted before")

    async def drain(self, request: web.Request) -> web.Response:
        body = await read_body(request, DrainBody)
        job, target = self._target(request)
        if not (matching := _matching(job, target)):
            raise _no_replica(job, target)
        here = [one for one in matching if one.state is not ReplicaState.GONE]
        order = DrainOrdered(target, _reason(body.reason), _who(request))
        said_before = bool(here) and all(one.draining for one in here)
        if made := await self._carried_out(job, None if said_before else order, "drain"):
            return _done(made, f"{made.replica_id} is asked to finish its step and leave")
        incarnations = [one.replica_id for one in here or matching]
        before = self._latest(job, "drain", *incarnations, *map(name_of, incarnations))
        if before is None:
            raise Problem(HTTPStatus.CONFLICT, f"{target} is gone already")
        return _nothing(before, f"{before.replica_id} was asked before" + ("" if here else ", and is gone"))

    async def straggler(self, request: web.Request) -> web.Response:
        body = await read_body(request, StragglerBody)
        if not all(0 <= one <= MAX_STEPS for one in asdict(body).values()):
            raise bad(f"steps, seconds and median_seconds must be between 0 and {MAX_STEPS}")
        job, target = self._target(request)
        found = StragglerFound(target, body.steps, body.seconds, body.median_seconds, _who(request))
        if (why := job.core.stays(found)) is not None:
            raise Problem(HTTPStatus.CONFLICT, f"{target} is not drained: {why}")
        made = await self._carried_out(job, found, "drain")
        assert made is not None  # nothing came between
        return _done(made, f"{target} is asked to finish its step and leave")

    async def readmit(self, request: web.Request) -> web.Response:
        await read_body(request, ReadmitBody)
        job, target = self._target(request)
        lifted = bans.lifted(job.core.record, target)
        if made := await self._carried_out(job, ReadmitOrdered(target, _who(request)), "readmitted"):
            return _done(made, f"{', '.join(dict.fromkeys(lifted))} may come back")
        before = self._latest(job, "readmitted", target)
        if before is None:
            raise Problem(HTTPStatus.CONFLICT, f"nothing stands against {target}")
        return _nothing(before, f"nothing stands against {target}")

    async def change_policy(self, request: web.Request) -> web.Response:
        changes = checked(await read_json(request), Policy)
        if not changes:
            raise bad(f"nothing to change is given; {those([one.name for one in fields(Policy)])}")
        job = self._job(request)
        policy = replace(job.core.record.policy, **changes)
        if (problem := policy_problem(policy)) is not None:
            raise bad(problem)
        made = await self._carried_out(job, PolicyOrdered(policy, _who(request)), "policy")
        self._lighthouse.endings.wake()
        return json_answer(PolicyChange(job.name, policy, made), HTTPStatus.ACCEPTED)

    async def delete_job(self, request: web.Request) -> web.Response:
        force = request.query.get("force", "false")
        if force not in ("true", "false"):
            raise bad(f"force is true or false, not {force[:40]!r}")
        job = self._job(request)
        if (conflict := _conflict(job)) is not None and (job.closed or force == "false"):
            raise Problem(HTTPStatus.CONFLICT, conflict)
        try:
            made = await self._lighthouse.endings.delete(job, _who(request))
        except TermOverError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        evicted = made.detail["evicted"]
        also = f", and {len(evicted)} of its groups evicted" if isinstance(evicted, list) and evicted else ""
        return _done(made, f"job {job.name} is deleted{also}")

    async def verify(self, request: web.Request) -> web.Response:
        await read_body(request, VerifyBody)
        made = await self._carried_out(self._job(request), VerifyOrdered(_who(request)), "verify_ordered")
        assert made is not None  # every one is carried out
        return _done(made, "the groups are compared at the next step; replicas_verified or replicas_differ will tell")

    async def _carried_out(self, job: Job, order: Event | None, kind: str) -> Happened | None:
        """Carries out ``order``; the first entry of this kind that it made, None if there was nothing to do."""
        try:
            made = await job.order(order) if order is not None else []
        except TermOverError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        return next((one for one in made if one.kind == kind), None)

    def _latest(self, job: Job, kind: str, *targets: str) -> Happened | None:
        """The last entry of this kind for one of ``targets``."""
        found = (self._lighthouse.events.latest(job.name, kind, one) for one in targets)
        return max((one for one in found if one is not None), key=lambda one: one.id, default=None)

    # ---- services

    async def put_service(self, request: web.Request) -> web.Response:
        body, term = await read_body(request, ServiceBody), self._lighthouse.leading()
        kind, name = request.match_info["kind"], request.match_info["name"]
        record = new_record(kind, name, body.address, body.ttl_seconds, body.details)
        if (problem := service_records.record_problem(record)) is not None:
            raise bad(problem)
        return json_answer(await _written(self._lighthouse.registry.put(term.epoch, record)))

    async def delete_service(self, request: web.Request) -> web.Response:
        kind, name = request.match_info["kind"], request.match_info["name"]
        if (problem := service_records.name_problem(kind, name)) is not None:
            raise bad(problem)
        await _written(self._lighthouse.registry.delete(self._lighthouse.leading().epoch, kind, name))
        return web.Response(status=HTTPStatus.NO_CONTENT)

    # ---- events

    async def events(self, request: web.Request) -> web.StreamResponse:
        job = self._job(request).name
        newest = "after" not in request.query
        after = number(request, "after", 0)
        if request.query.get("follow", "0") not in ("0", "1"):
            raise bad("follow is 0 or 1")
        if request.query.get("follow") == "1":
            return await self._follow(request, job, after)
        limit, events = min(number(request, "limit", EVENTS_AT_ONCE), MAX_EVENTS_AT_ONCE), self._lighthouse.events
        found = tuple(events.newest(job, limit) if newest else events.after(job, after, limit))
        return json_answer(EventsView(job, found, found[-1].id if found else after))

    async def _follow(self, request: web.Request, job: str, after: int) -> web.StreamResponse:
        """A follower holds a number, no queue: what it is too slow for has left the memory, and it is told so."""
        if self._followers >= MAX_FOLLOWERS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_FOLLOWERS} follow already")
        if known := request.headers.get("Last-Event-ID", ""):
            after = int(known) if known.isdecimal() and len(known) <= MAX_DIGITS else after
        stream = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-store"})
        events = self._lighthouse.events
        self._followers += 1
        try:
            await stream.prepare(request)
            while self._lighthouse.serving:
                has_ended = job not in self._lighthouse.jobs
                if batch := events.after(job, after, FOLLOWER_BATCH):
                    text = ": events before this were missed\n\n" if after and events.missed(job, after) else ""
                    text += "".join(f"id: {one.id}\nevent: {one.kind}\ndata: {one.json()}\n\n" for one in batch)
                    after = batch[-1].id
                elif has_ended:
                    break  # who follows on is told that there is no such job
                else:
                    text = ""
                    try:
                        async with asyncio.timeout(SIGN_OF_LIFE_SECONDS):
                            await events.news(job).wait()
                        continue
                    except TimeoutError:
                        text = ": nothing new\n\n"
                async with asyncio.timeout(SLOW_FOLLOWER_SECONDS):
                    await stream.write(text.encode())
        except (ConnectionError, TimeoutError):
            # The follower went, or takes nothing: its connection is of no use any more.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._followers -= 1
        return stream

    # ---- what is asked for

    def _job(self, request: web.Request) -> Job:
        self._lighthouse.leading()
        name = request.match_info["job"]
        job = self._lighthouse.jobs.get(name)
        if job is None:
            known = sorted(self._lighthouse.jobs)
            detail = f"there is no job {name!r}; {those(known)}; one begins with the first group that names it"
            if (ending := self._lighthouse.events.endings.get(name)) is not None:
                at = datetime.fromtimestamp(ending.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                detail = f"job {name!r} was deleted by {ending.detail['by']} at {at}; {detail}"
            raise Problem(HTTPStatus.NOT_FOUND, f"{detail}: keepstep run --job {name}", known=known[:MAX_NAMED])
        return job

    def _target(self, request: web.Request) -> tuple[Job, str]:
        """The job, and the stable name or incarnation that is meant. Of an incarnation the beginning is enough."""
        job, target = self._job(request), request.match_info["replica_id"]
        known = {one.replica_id for one in job.core.replicas(time.monotonic())} | set(job.core.record.evicted)
        names = {name_of(one) for one in known}
        meant = [
            one
            for one in known
            if one.startswith(target) and len(target) - len(name_of(one)) > MIN_INCARNATION_CHARACTERS
        ]
        return job, meant[0] if target not in known | names and len(meant) == 1 else target


def _job_view(job: Job) -> JobView:
    quorum, record, expires = job.core.quorum_view(time.monotonic()), job.core.record, due_at(job.use)
    return JobView(
        job=job.name,
        policy=record.policy,
        quorum_id=quorum.quorum_id,
        members=len(quorum.members),
        asking=len(quorum.asking),
        healthy=quorum.healthy,
        joiners=quorum.joiners,
        sessions=len(job.sessions),
        bans=tuple(ban for ban in record.bans if time.time() < ban.until),
        evicted=record.evicted,
        expires_in_seconds=None if expires == NEVER else max(0.0, expires - time.monotonic()),
    )


def _conflict(job: Job) -> str | None:
    """Why the job is not deleted without force, as a sentence; None: it may be."""
    if job.closed:
        return f"job {job.name!r} is being deleted already"
    advice = "end them first (keepstep drain, or stop their launchers), or evict them with force=true (--force)"
    if job.sessions:
        names = sorted(session.replica_id for session in job.sessions.values())
        return f"job {job.name!r} is in use: {len(names)} connected groups ({listed(names, MAX_NAMED)}); {advice}"
    if (returning := job.core.returning()) is not None:
        return f"job {job.name!r} is in use: {returning}; wait for them to come or to be lost, or force=true (--force)"
    return None


def _matching(job: Job, target: str) -> list[ReplicaView]:
    return [one for one in job.core.replicas(time.monotonic()) if target in (one.replica_id, name_of(one.replica_id))]


def _no_replica(job: Job, target: str) -> Problem:
    known = sorted({one.replica_id for one in job.core.replicas(time.monotonic())})
    detail = f"there is no replica group {target!r} in job {job.name!r}; {those(known)}"
    return Problem(HTTPStatus.NOT_FOUND, detail, known=known[:MAX_NAMED])


def _done(made: Happened, sentence: str) -> web.Response:
    return json_answer(OrderAnswer(**asdict(made), done=True, sentence=sentence), HTTPStatus.ACCEPTED)


def _nothing(before: Happened, why: str) -> web.Response:
    return json_answer(OrderAnswer(**asdict(before), done=False, sentence=f"nothing to do: {why}"), HTTPStatus.ACCEPTED)


def _who(request: web.Request) -> str:
    return str(request[CALLER])


def _reason(text: str) -> str:
    if len(text) > MAX_REASON:
        raise bad(f"reason has {len(text)} characters; at most {MAX_REASON} are taken")
    return text


async def _written(writing: Awaitable[T]) -> T:
    try:
        return await writing
    except (StoreError, TermOverError) as error:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
    except TimeoutError:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the store does not answer; ask again") from None
