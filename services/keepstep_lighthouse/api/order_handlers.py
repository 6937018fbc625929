"""Handlers that change a job: evict, drain, replace, readmit, verify, policy, deletion; and reports of launchers.

An order is handled like any other event: it is written, then answered with 202, the entry that it made in the event
log, and a sentence that describes the effect. An order that changes nothing because an earlier one did the same is
answered with the entry of the earlier one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from http import HTTPStatus
from typing import get_type_hints

from aiohttp import web

from keepstep_lighthouse.api.bodies import (
    DrainBody,
    EvictBody,
    ReadmitBody,
    ReopenBody,
    ReplaceBody,
    StragglerBody,
    VerifyBody,
)
from keepstep_lighthouse.api.lookup import find_job, find_replicas, find_target, no_replica
from keepstep_lighthouse.incidents.judgement import Report
from keepstep_lighthouse.jobs.event_log import Happened
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.leadership.term import TermOverError
from keepstep_lighthouse.quorum.events import (
    DrainOrdered,
    Event,
    EvictOrdered,
    PolicyOrdered,
    ReadmitOrdered,
    ReopenOrdered,
    ReplaceOrdered,
    StragglerFound,
    VerifyOrdered,
)
from keepstep_lighthouse.quorum.presence import bans
from keepstep_lighthouse.quorum.spares import NO_SPARE
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.names import group_name_problem, name_of
from keepstep_mesh.protocol.policy import MAX_SECONDS, MAX_STEPS, Policy, policy_problem
from keepstep_mesh.serving.application import CALLER, read_json
from keepstep_mesh.serving.rest import MAX_NAMED, bad, checked, json_answer, read_body
from keepstep_mesh.text import listed

MAX_REASON = 1000
MAX_LOG = 16_000
LIMITS = dict.fromkeys(get_type_hints(Report), MAX_REASON) | {"log": MAX_LOG, "rank": 9, "code": 9, "oom_kills": 9}
"""Characters of the fields of a report."""


@dataclass(frozen=True, slots=True)
class OrderAnswer(Happened):
    """The event log entry of the order, or of an earlier order that had the same effect."""

    done: bool
    """False: an earlier order had the same effect."""
    sentence: str
    """Describes the effect to an operator."""


@dataclass(frozen=True, slots=True)
class PolicyChange:
    job: str
    policy: Policy
    """In force, and stored."""
    event: Happened | None
    """Entry of this change; None: the policy was the same before."""


class OrderHandlers:
    def __init__(self, node: LighthouseNode) -> None:
        self._node = node

    async def evict(self, request: web.Request) -> web.Response:
        body = await read_body(request, EvictBody)
        if not 0 <= body.ban_seconds <= MAX_SECONDS:
            raise bad(f"ban_seconds must be between 0 and {MAX_SECONDS:.0f}, not {body.ban_seconds!r:.40}")
        job, target = find_target(self._node, request)
        found = find_replicas(job, target)
        here = [one for one in found if one.state is not ReplicaState.GONE]
        if not found and not body.ban_seconds:
            raise no_replica(job, target)
        forgets = bool(found) and not here and not body.ban_seconds
        evicted = found[-1].replica_id if forgets else target
        order = EvictOrdered(evicted, _reason(body.reason), body.ban_seconds, _who(request))
        is_repeated = forgets and evicted in job.core.record.evicted
        if made := await self._execute(job, None if is_repeated else order, "evicted"):
            gone = f"{made.replica_id} is evicted" if here else f"no group {target} is connected"
            gone += f"; {target} counts as lost no longer" if forgets else ""
            banned = f"; {target} is banned for {body.ban_seconds:g} s" if body.ban_seconds else ""
            return _done(made, gone + banned)
        names = {name_of(one.replica_id) for one in found}
        names |= {name_of(one) for one in job.core.record.evicted if one == target}
        before = self._latest(job, "evicted", target, *names)
        lifted = self._latest(job, "readmitted", target, *names)
        if before is None or (lifted is not None and lifted.id > before.id):
            raise Problem(HTTPStatus.CONFLICT, f"{target} has left; to keep it out, set ban_seconds")
        return _nothing(before, f"{target} has left and is evicted already")

    async def drain(self, request: web.Request) -> web.Response:
        body = await read_body(request, DrainBody)
        job, target = find_target(self._node, request)
        if not (found := find_replicas(job, target)):
            raise no_replica(job, target)
        here = [one for one in found if one.state is not ReplicaState.GONE]
        order = DrainOrdered(target, _reason(body.reason), _who(request))
        is_repeated = bool(here) and all(one.draining for one in here)
        if made := await self._execute(job, None if is_repeated else order, "drain"):
            return _done(made, f"{made.replica_id} is asked to finish its step and leave")
        incarnations = [one.replica_id for one in here or found]
        before = self._latest(job, "drain", *incarnations, *map(name_of, incarnations))
        if before is None:
            raise Problem(HTTPStatus.CONFLICT, f"{target} has left already")
        return _nothing(
            before, f"{before.replica_id} " + ("is draining already" if here else "was drained and has left")
        )

    async def replace(self, request: web.Request) -> web.Response:
        body = await read_body(request, ReplaceBody)
        job, target = find_target(self._node, request)
        if not find_replicas(job, target):
            raise no_replica(job, target)
        if (why := job.core.irreplaceable(target)) is not None:
            advice = "; start spares (keepstep run --spares), or let it leave without one (keepstep drain)"
            raise Problem(HTTPStatus.CONFLICT, f"{target} cannot be replaced: {why}{advice if why == NO_SPARE else ''}")
        order = ReplaceOrdered(target, _reason(body.reason), _who(request))
        if made := await self._execute(job, order, "replace"):
            return _done(made, f"a spare takes the place of {made.replica_id}, which then leaves")
        known = (one.replica_id for one in job.core.record.replacing)
        ordered = [one for one in known if target in (one, name_of(one))]
        before = self._latest(job, "replace", *ordered)
        if before is None:
            raise Problem(
                HTTPStatus.CONFLICT, f"{target} was not replaced: its state changed during the request; try again"
            )
        return _nothing(before, f"a spare replaces {before.replica_id} already")

    async def straggler(self, request: web.Request) -> web.Response:
        body = await read_body(request, StragglerBody)
        if not all(0 <= one <= MAX_STEPS for one in asdict(body).values()):
            raise bad(f"steps, seconds and median_seconds must be between 0 and {MAX_STEPS}")
        job, target = find_target(self._node, request)
        found = StragglerFound(target, body.steps, body.seconds, body.median_seconds, _who(request))
        if (why := job.core.stays(found)) is not None:
            raise Problem(HTTPStatus.CONFLICT, f"{target} is not drained: {why}")
        made = await self._execute(job, found, "drain")
        assert made is not None  # no event was handled in between
        return _done(made, f"{target} is asked to finish its step and leave")

    async def readmit(self, request: web.Request) -> web.Response:
        await read_body(request, ReadmitBody)
        job, target = find_target(self._node, request)
        lifted = bans.lifted(job.core.record, target)
        if made := await self._execute(job, ReadmitOrdered(target, _who(request)), "readmitted"):
            if not lifted:
                return _done(made, f"{target} is no longer on probation")
            return _done(made, f"{', '.join(dict.fromkeys(lifted))} may connect again")
        before = self._latest(job, "readmitted", target)
        if before is None:
            raise Problem(HTTPStatus.CONFLICT, f"{target} is neither banned nor evicted")
        return _nothing(before, f"{target} is neither banned nor evicted")

    async def change_policy(self, request: web.Request) -> web.Response:
        changes = checked(await read_json(request), Policy)
        if not changes:
            raise bad(
                f"the body has no field of the policy: expected one of {', '.join(one.name for one in fields(Policy))}"
            )
        job = find_job(self._node, request)
        policy = replace(job.core.record.policy, **changes)
        if (problem := policy_problem(policy)) is not None:
            raise bad(problem)
        made = await self._execute(job, PolicyOrdered(policy, _who(request)), "policy")
        self._node.endings.wake()
        return json_answer(PolicyChange(job.name, policy, made), HTTPStatus.ACCEPTED)

    async def delete_job(self, request: web.Request) -> web.Response:
        force = request.query.get("force", "false")
        if force not in ("true", "false"):
            raise bad(f"invalid force {force[:40]!r}: expected true or false")
        job = find_job(self._node, request)
        if (conflict := _conflict(job)) is not None and (job.closed or force == "false"):
            raise Problem(HTTPStatus.CONFLICT, conflict)
        try:
            made = await self._node.endings.delete(job, _who(request))
        except TermOverError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        evicted = made.detail["evicted"]
        also = f", and {len(evicted)} of its groups evicted" if isinstance(evicted, list) and evicted else ""
        return _done(made, f"job {job.name} is deleted{also}")

    async def reopen(self, request: web.Request) -> web.Response:
        await read_body(request, ReopenBody)
        job = find_job(self._node, request)
        final = job.core.record.closed
        made = await self._execute(job, ReopenOrdered(_who(request)), "reopened")
        if made is not None and final is not None:
            return _done(made, f"job {job.name} may train on from a checkpoint of step {final.step}")
        before = self._latest(job, "reopened", "")
        if before is None:
            raise Problem(HTTPStatus.CONFLICT, f"job {job.name} is not closed: its groups have not finished together")
        return _nothing(before, f"job {job.name} is not closed")

    async def verify(self, request: web.Request) -> web.Response:
        await read_body(request, VerifyBody)
        job = find_job(self._node, request)
        if job.core.incomparable:
            raise Problem(HTTPStatus.CONFLICT, "the model exists once: each group holds other shards, so none compare")
        made = await self._execute(job, VerifyOrdered(_who(request)), "verify_ordered")
        assert made is not None  # this order always has an effect
        return _done(
            made,
            "the groups are compared at the next step; the event replicas_verified or replicas_differ has the result",
        )

    async def report(self, request: web.Request) -> web.Response:
        told = await read_body(request, Report)
        if long := next((one for one in fields(told) if len(str(getattr(told, one.name))) > LIMITS[one.name]), None):
            raise bad(f"{long.name} too long: more than {LIMITS[long.name]} characters")
        if (problem := group_name_problem(name_of(told.replica_id))) is not None:
            raise bad(f"replica_id: {problem}")
        ago = min(max(0.0, told.seconds_ago), MAX_SECONDS)
        find_job(self._node, request).report(replace(told, seconds_ago=ago))
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _execute(self, job: Job, order: Event | None, kind: str) -> Happened | None:
        """Handle ``order`` and return the first entry of this kind that it made; None: it changed nothing."""
        try:
            made = await job.order(order) if order is not None else []
        except TermOverError as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        return next((one for one in made if one.kind == kind), None)

    def _latest(self, job: Job, kind: str, *targets: str) -> Happened | None:
        """Return the last entry of this kind for one of ``targets``."""
        found = (self._node.events.latest(job.name, kind, one) for one in targets)
        return max((one for one in found if one is not None), key=lambda one: one.id, default=None)


def _conflict(job: Job) -> str | None:
    """Return why the job is not deleted without force, as a sentence; None: it may be deleted."""
    if job.closed:
        return f"job {job.name!r} is being deleted already"
    advice = "end them first (keepstep drain, or stop their launchers), or evict them with force=true (--force)"
    if job.sessions:
        names = sorted(session.replica_id for session in job.sessions.values())
        return f"job {job.name!r} is in use: {len(names)} connected groups ({listed(names, MAX_NAMED)}); {advice}"
    if (returning := job.core.returning()) is not None:
        return f"job {job.name!r} is in use: {returning}; wait until they are back or lost, or use force=true (--force)"
    return None


def _done(made: Happened, sentence: str) -> web.Response:
    return json_answer(OrderAnswer(**asdict(made), done=True, sentence=sentence), HTTPStatus.ACCEPTED)


def _nothing(before: Happened, why: str) -> web.Response:
    return json_answer(OrderAnswer(**asdict(before), done=False, sentence=f"nothing to do: {why}"), HTTPStatus.ACCEPTED)


def _who(request: web.Request) -> str:
    return str(request[CALLER])


def _reason(text: str) -> str:
    if len(text) > MAX_REASON:
        raise bad(f"reason too long: {len(text)} characters (limit {MAX_REASON})")
    return text
