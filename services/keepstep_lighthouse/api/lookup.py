"""Find the job and the group that the path of a request names."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from http import HTTPStatus

from aiohttp import web

from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.quorum.views.replicas import ReplicaView
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.serving.rest import MAX_NAMED, known_names

MIN_INCARNATION_CHARACTERS = 8
"""A prefix of an incarnation names it if at least so many characters follow the colon."""


def find_job(node: LighthouseNode, request: web.Request) -> Job:
    """Return the job. Raise ``Problem`` 404 if it does not exist, 503 if this lighthouse has no term."""
    node.leading()
    name = request.match_info["job"]
    job = node.jobs.get(name)
    if job is None:
        known = sorted(node.jobs)
        detail = f"job {name!r} not found; {known_names('jobs', known)}; a job is created when its first group connects"
        if (ending := node.events.endings.get(name)) is not None:
            at = datetime.fromtimestamp(ending.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            detail = f"job {name!r} was deleted by {ending.detail['by']} at {at}; {detail}"
        raise Problem(HTTPStatus.NOT_FOUND, f"{detail}: keepstep run --job {name}", known=known[:MAX_NAMED])
    return job


def find_target(node: LighthouseNode, request: web.Request) -> tuple[Job, str]:
    """Return the job, and the stable name or incarnation of the path; an unambiguous prefix is completed."""
    job, target = find_job(node, request), request.match_info["replica_id"]
    known = {one.replica_id for one in job.core.replicas(time.monotonic())} | set(job.core.record.evicted)
    names = {name_of(one) for one in known}
    meant = [
        one for one in known if one.startswith(target) and len(target) - len(name_of(one)) > MIN_INCARNATION_CHARACTERS
    ]
    return job, meant[0] if target not in known | names and len(meant) == 1 else target


def find_replicas(job: Job, target: str) -> list[ReplicaView]:
    """Return the incarnations that ``target`` names, those that left recently included."""
    return [one for one in job.core.replicas(time.monotonic()) if target in (one.replica_id, name_of(one.replica_id))]


def no_replica(job: Job, target: str) -> Problem:
    known = sorted({one.replica_id for one in job.core.replicas(time.monotonic())})
    names = sorted({name_of(one) for one in known})
    detail = f"replica group {target!r} not found in job {job.name!r}; {known_names('groups', names)}"
    return Problem(HTTPStatus.NOT_FOUND, detail, known=known[:MAX_NAMED])
