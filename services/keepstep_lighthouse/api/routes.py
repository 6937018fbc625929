"""The table of the lighthouse's REST routes: handler, access, and what ``/openapi.json`` says about each."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from keepstep_lighthouse.api.bodies import (
    DrainBody,
    EvictBody,
    ReadmitBody,
    ReopenBody,
    ReplaceBody,
    ServiceBody,
    StragglerBody,
    VerifyBody,
)
from keepstep_lighthouse.api.cluster import ClusterView
from keepstep_lighthouse.api.event_stream import EVENTS_AT_ONCE, MAX_EVENTS_AT_ONCE, EventHandlers, EventsView
from keepstep_lighthouse.api.order_handlers import OrderAnswer, OrderHandlers, PolicyChange
from keepstep_lighthouse.api.read_handlers import (
    IncidentsView,
    JobsView,
    JobView,
    QuorumStatus,
    ReadHandlers,
    ReplicasView,
    StacksView,
    TransfersView,
    WholeIncident,
)
from keepstep_lighthouse.api.service_handlers import ServiceHandlers
from keepstep_lighthouse.incidents.judgement import Report
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.quorum.views.replicas import ReplicaView
from keepstep_lighthouse.registry.service_records import ServiceRecord
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving import openapi
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.openapi import Shape

SWITCHES_OF_DELETION = {"force": "true: groups that are connected are evicted; otherwise they are a conflict (409)"}
QUERY_OF_EVENTS = {
    "after": "number of the last event that the client has; the answer begins with the next. Default: the newest page",
    "limit": f"maximum number of events, up to {MAX_EVENTS_AT_ONCE}; default {EVENTS_AT_ONCE}",
    "follow": "1: server-sent events, first those in memory, then each new one",
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
    "POST /v1/jobs/{job}/reopen": Shape(OrderAnswer, status=202, body=ReopenBody),
    "GET /v1/jobs/{job}/replicas": Shape(ReplicasView),
    "GET /v1/jobs/{job}/replicas/{replica_id}": Shape(ReplicaView),
    "GET /v1/jobs/{job}/transfers": Shape(TransfersView),
    "POST /v1/jobs/{job}/replicas/{replica_id}/evict": Shape(OrderAnswer, status=202, body=EvictBody),
    "POST /v1/jobs/{job}/replicas/{replica_id}/drain": Shape(OrderAnswer, status=202, body=DrainBody),
    "POST /v1/jobs/{job}/replicas/{replica_id}/replace": Shape(OrderAnswer, status=202, body=ReplaceBody),
    "POST /v1/jobs/{job}/replicas/{replica_id}/readmit": Shape(OrderAnswer, status=202, body=ReadmitBody),
    "POST /v1/jobs/{job}/replicas/{replica_id}/straggler": Shape(OrderAnswer, status=202, body=StragglerBody),
    "GET /v1/jobs/{job}/stacks": Shape(StacksView, query={"group": "stable name or incarnation; default: all groups"}),
    "GET /v1/jobs/{job}/incidents": Shape(IncidentsView),
    "GET /v1/jobs/{job}/incidents/{number}": Shape(WholeIncident),
    "POST /v1/jobs/{job}/incidents": Shape(None, status=204, body=Report),
    "GET /v1/jobs/{job}/events": Shape(EventsView, query=QUERY_OF_EVENTS),
}


def routes(node: LighthouseNode, all_routes: Callable[[], list[Route]]) -> list[Route]:
    """Return the REST routes of ``node``.

    Args:
        node: the lighthouse.
        all_routes: gives the routes that ``/openapi.json`` describes.
    """
    reads, orders = ReadHandlers(node), OrderHandlers(node)
    services, events = ServiceHandlers(node), EventHandlers(node)

    async def describe(_request: web.Request) -> web.Response:
        return web.json_response(openapi.describe("keepstep lighthouse", all_routes(), SHAPES))

    job, one = "/v1/jobs/{job}", "/v1/jobs/{job}/replicas/{replica_id}"
    service = "/v1/services/{kind}/{name}"
    return [
        Route("GET", "/", reads.dashboard, Access.OPEN, "redirect a browser to the dashboard of the metrics service"),
        Route("GET", "/openapi.json", describe, Access.OPEN, "this description"),
        Route("GET", "/v1/cluster", reads.cluster, Access.READ, "lighthouses, leader, epoch, registered services"),
        Route("PUT", service, services.put_service, Access.SERVICE, "register a service, or renew its registration"),
        Route("DELETE", service, services.delete_service, Access.SERVICE, "remove a service"),
        Route("GET", "/v1/jobs", reads.jobs, Access.READ, "all jobs"),
        Route("GET", job, reads.job, Access.READ, "one job: policy, counts, bans"),
        Route("PATCH", job, orders.change_policy, Access.ADMIN, "change the given fields of the policy"),
        Route("DELETE", job, orders.delete_job, Access.ADMIN, "delete a job: its record, policy, bans and event list"),
        Route("GET", f"{job}/quorum", reads.quorum, Access.READ, "the quorum, and why the next one is not formed yet"),
        Route(
            "POST", f"{job}/verify", orders.verify, Access.ADMIN, "compare the weights of all groups at the next step"
        ),
        Route("POST", f"{job}/reopen", orders.reopen, Access.ADMIN, "let the groups of a closed job train on"),
        Route("GET", f"{job}/replicas", reads.replicas, Access.READ, "all groups, and those that left recently"),
        Route("GET", one, reads.replica, Access.READ, "one group, by stable name or incarnation"),
        Route("GET", f"{job}/transfers", reads.transfers, Access.READ, "heals in progress: bytes, rate, time left"),
        Route("POST", f"{one}/evict", orders.evict, Access.ADMIN, "evict a group; ban_seconds also bans its name"),
        Route("POST", f"{one}/drain", orders.drain, Access.ADMIN, "ask a group to finish its step and leave"),
        Route("POST", f"{one}/replace", orders.replace, Access.ADMIN, "let a spare take the place of a group"),
        Route("POST", f"{one}/readmit", orders.readmit, Access.ADMIN, "lift bans and evictions"),
        Route(
            "POST",
            f"{one}/straggler",
            orders.straggler,
            Access.SERVICE,
            "report a group that is slower than the others; the policy decides whether it is drained",
            is_order=True,
        ),
        Route("GET", f"{job}/stacks", reads.stacks, Access.ADMIN, "ask the ranks of groups for their stacks"),
        Route("GET", f"{job}/incidents", reads.incidents, Access.READ, "why groups ended, and which machines fail"),
        Route("GET", f"{job}/incidents/{{number}}", reads.incident, Access.ADMIN, "one incident, with log and stacks"),
        Route("POST", f"{job}/incidents", orders.report, Access.WORKER, "report the end of a group (its launcher)"),
        Route("GET", f"{job}/events", events.events, Access.READ, "the event log: a page, or a stream of new entries"),
    ]
