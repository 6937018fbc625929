"""Handlers that answer from memory: jobs, quorums, groups, heals, and the cluster; and from ranks: their stacks."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from http import HTTPStatus

from aiohttp import web

from keepstep_lighthouse.api import cluster
from keepstep_lighthouse.api.lookup import find_job, find_replicas, find_target, no_replica
from keepstep_lighthouse.incidents.listing import HostView, IncidentView, ranked
from keepstep_lighthouse.jobs.expiry import NEVER, due_at
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.quorum.events import Reason
from keepstep_lighthouse.quorum.job_record import Ban
from keepstep_lighthouse.quorum.views.job_status import JobStatus
from keepstep_lighthouse.quorum.views.replicas import HealView, QuorumView, ReplicaState, ReplicaView
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.protocol.stack_messages import RankStacks
from keepstep_mesh.serving.rest import bad, json_answer

STACKS_SECONDS = 4.0
"""Limit of the wait for the stacks of ranks: those that do not answer are left out, and named."""


@dataclass(frozen=True, slots=True)
class JobView:
    job: str
    state: JobStatus
    step: int
    """That the job has reached, as of its last quorum or of a group that finished; 0: no committed step is known."""
    finished_step: int
    """Highest step at which a group finished, unless the job went beyond it; 0: none."""
    policy: Policy
    quorum_id: int
    members: int
    """Groups of the quorum that have not left and are not lost."""
    asking: int
    healthy: int
    joiners: int
    sessions: int
    bans: tuple[Ban, ...]
    """Those that have not expired."""
    evicted: tuple[str, ...]
    steps_per_second: float | None
    """Over the last 10 s, or the last 20 steps if they took longer; None: too few steps."""
    last_commit_seconds_ago: float | None
    """None: no commit since this lighthouse leads."""
    expires_in_seconds: float | None
    """Time until the unused job is deleted; None: it is in use, or its job_ttl is 0."""
    exposed: tuple[str, ...]
    """As in the quorum: members of a job whose model exists once, without copies of their shards."""
    copies_bytes: int
    hangs: tuple[str, ...]
    """As in the quorum."""
    incident: IncidentView | None
    """The newest one; None: no group has ended without an order."""
    joins: str
    """As in the quorum."""
    closed: FinalState | None
    """State at which all groups finished together; None: the job is open."""


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
class GroupStacks:
    replica_id: str
    ranks: tuple[RankStacks, ...]
    """Those that have answered, sorted by rank."""
    silent: tuple[int, ...]
    """Ranks that have not answered."""


@dataclass(frozen=True, slots=True)
class StacksView:
    job: str
    groups: tuple[GroupStacks, ...]
    hangs: tuple[str, ...]
    """As in the quorum."""


@dataclass(frozen=True, slots=True)
class IncidentsView:
    job: str
    incidents: tuple[IncidentView, ...]
    """Newest first."""
    hosts: tuple[HostView, ...]
    """Machines that fail repeatedly, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeIncident(IncidentView):
    log: tuple[str, ...]
    """The last lines of its output; none: no launcher told, or the lighthouse that received them has ended."""
    stacks: tuple[RankStacks, ...]
    """Of a group that was late."""


class ReadHandlers:
    def __init__(self, node: LighthouseNode) -> None:
        self._node = node

    async def dashboard(self, _request: web.Request) -> web.Response:
        self._node.leading()
        if (address := self._node.metrics_address()) is None:
            raise Problem(HTTPStatus.NOT_FOUND, "no metrics service is registered; start one with: keepstep metrics")
        raise web.HTTPFound(f"{address}/")

    async def cluster(self, request: web.Request) -> web.Response:
        # The address that the client used: the bind address may be a wildcard.
        try:
            here = str(request.url.origin())
        except ValueError as error:
            raise bad(f"invalid Host header: {error}") from error
        return json_answer(await cluster.view(self._node, here))

    async def jobs(self, _request: web.Request) -> web.Response:
        self._node.leading()
        return json_answer(JobsView(tuple(_job_view(job) for _, job in sorted(self._node.jobs.items()))))

    async def job(self, request: web.Request) -> web.Response:
        return json_answer(_job_view(find_job(self._node, request)))

    async def quorum(self, request: web.Request) -> web.Response:
        job = find_job(self._node, request)
        view = job.core.quorum_view(time.monotonic())
        age = time.time() - view.created_ms / 1000 if view.created_ms else None
        known = {field.name: getattr(view, field.name) for field in fields(view)}
        if job.term.trouble is not None:
            known["reason"] = Reason("store", {}, f"no quorum is announced: {job.term.trouble}")
        return json_answer(QuorumStatus(**known, job=job.name, epoch=job.term.epoch, age_seconds=age))

    async def replicas(self, request: web.Request) -> web.Response:
        job = find_job(self._node, request)
        now = time.monotonic()
        views = tuple(job.history.with_facts(view, now) for view in job.core.replicas(now))
        return json_answer(ReplicasView(job.name, views))

    async def replica(self, request: web.Request) -> web.Response:
        job, target = find_target(self._node, request)
        found = find_replicas(job, target)
        if not found:
            raise no_replica(job, target)
        # Of several incarnations, prefer one that is connected, then a member of the quorum, then the newest.
        best = min(found, key=lambda one: (one.state is ReplicaState.GONE, not one.member))
        return json_answer(job.history.with_facts(best, time.monotonic()))

    async def transfers(self, request: web.Request) -> web.Response:
        job = find_job(self._node, request)
        return json_answer(TransfersView(job.name, job.core.heals(time.monotonic())))

    async def stacks(self, request: web.Request) -> web.Response:
        job, target = find_job(self._node, request), request.query.get("group", "")
        found = await job.stacks(target, STACKS_SECONDS)
        if target and not found:
            raise Problem(HTTPStatus.NOT_FOUND, f"group {target!r:.80} of job {job.name!r} is not connected")
        groups = tuple(
            GroupStacks(
                replica_id,
                tuple(known[rank] for rank in sorted(known)),
                tuple(rank for rank in range(world) if rank not in known),
            )
            for replica_id, (world, known) in sorted(found.items())
        )
        return json_answer(StacksView(job.name, groups, job.core.hang_sentences()))

    async def incidents(self, request: web.Request) -> web.Response:
        job = find_job(self._node, request)
        found = tuple(job.listed_incidents())
        return json_answer(IncidentsView(job.name, found, tuple(ranked(found))))

    async def incident(self, request: web.Request) -> web.Response:
        job, number = find_job(self._node, request), request.match_info["number"]
        found = next((one for one in job.listed_incidents() if str(one.id) == number), None)
        if found is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"incident {number[:40]!r} of job {job.name!r} not found")
        log, stacks = self._node.events.private.get(found.id, ("", ()))
        known = {field.name: getattr(found, field.name) for field in fields(found)}
        return json_answer(WholeIncident(**known, log=tuple(log.splitlines()), stacks=stacks))


def _job_view(job: Job) -> JobView:
    now, record, expires = time.monotonic(), job.core.record, due_at(job.use)
    quorum = job.core.quorum_view(now)
    return JobView(
        job=job.name,
        state=job.core.status(now, time.time()),
        step=job.core.step,
        finished_step=job.core.finished_step,
        policy=record.policy,
        quorum_id=quorum.quorum_id,
        members=len(quorum.members),
        asking=len(quorum.asking),
        healthy=quorum.healthy,
        joiners=quorum.joiners,
        sessions=len(job.sessions),
        bans=tuple(ban for ban in record.bans if time.time() < ban.until),
        evicted=record.evicted,
        steps_per_second=job.rate.per_second(now),
        last_commit_seconds_ago=None if job.rate.committed_at is None else max(0.0, now - job.rate.committed_at),
        expires_in_seconds=None if expires == NEVER else max(0.0, expires - now),
        exposed=quorum.exposed,
        copies_bytes=quorum.copies_bytes,
        hangs=quorum.hangs,
        incident=job.newest_incident,
        joins=quorum.joins,
        closed=record.closed,
    )
