"""Checkpoints over HTTP: begin, plan, commit, list, remove. Bodies are JSON, except for manifests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from keepstep_mesh.config.settings import split_addresses
from keepstep_mesh.net.http import Problem
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving import openapi
from keepstep_mesh.serving.application import CALLER, ROLE, Route
from keepstep_mesh.serving.openapi import Shape
from keepstep_mesh.serving.rest import bad, json_answer, number, read_body
from keepstep_relay.api import answers, exchange, requests, torch_download
from keepstep_relay.api.views import (
    CheckpointDetail,
    CheckpointsView,
    CheckpointView,
    HoldersView,
    PlanView,
    checkpoint_view,
    detail_view,
    holders_view,
    plan_view,
)
from keepstep_relay.core.events import Facts, HolderReported, Key, Kind, RankReported, ReadFrom, RootReported
from keepstep_relay.node import RelayNode

ROOT_BYTES = 32
MAX_TEXT = 1000
MAX_STEP = 2**53


@dataclass(frozen=True, slots=True)
class BeginBody:
    id: str
    step: int
    kind: str = Kind.LIVE.value
    ranks: int = 1
    quorum_id: int = 0
    one_producer: bool = False
    """True: commit only if one producer reported the counting root of every rank, so that no ranks are mixed."""
    open: bool = False
    """True: never commit it. It can be read, and is dropped when a rank sends nothing for --upload-timeout."""
    overwrite: bool = False
    """True: begin or join the next version, which replaces a committed checkpoint when it is committed itself."""


@dataclass(frozen=True, slots=True)
class PlanBody:
    producer: str
    root: str
    """Root digest of the manifest, in hex."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ResultBody:
    rank: int = 0
    error: str | None = None
    """None: the rank's upload succeeded."""
    part: bool = False
    """True: the missing chunks are at other relays. For live states only."""


@dataclass(frozen=True, slots=True)
class AbortBody:
    reason: str


@dataclass(frozen=True, slots=True)
class HolderBody:
    address: str
    has: str
    """Bitmap in hex."""
    rank: int = 0


WAIT = {"wait": "seconds to wait for a missing chunk or manifest, at most 60"}
RANK = {"rank": "default: 0"}
BEGINNING = {
    "rank": "rank that begins",
    "again": "0: refuse a checkpoint that was deleted (410), with the reason; default 1: begin it",
}
CHECKPOINTS = "/v1/jobs/{job}/checkpoints"
ONE = f"{CHECKPOINTS}/{{id}}"
SHAPES = {
    f"GET {CHECKPOINTS}": Shape(CheckpointsView, query={"step": "only checkpoints of this step"}),
    f"POST {CHECKPOINTS}": Shape(CheckpointView, status=201, body=BeginBody, query=BEGINNING),
    f"GET {ONE}": Shape(CheckpointDetail),
    f"DELETE {ONE}": Shape(None, status=204),
    f"POST {ONE}/plan": Shape(PlanView, body=PlanBody),
    f"POST {ONE}/result": Shape(CheckpointView, body=ResultBody),
    f"POST {ONE}/commit": Shape(CheckpointView),
    f"POST {ONE}/abort": Shape(None, status=204, body=AbortBody),
    f"GET {ONE}/manifest": Shape(None, query=RANK | WAIT, gives_bytes=True),
    f"PUT {ONE}/manifest": Shape(PlanView, status=201, query=RANK, takes_bytes=True),
    f"GET {ONE}/holders": Shape(HoldersView, query=RANK),
    f"PUT {ONE}/holders/{{name}}": Shape(HoldersView, body=HolderBody),
    f"GET {ONE}/packs/{{rank}}": Shape(None, query=WAIT, gives_bytes=True),
    "HEAD /v1/chunks/{digest}": Shape(None),
    "GET /v1/chunks/{digest}": Shape(None, query=WAIT, gives_bytes=True),
    "PUT /v1/chunks/{digest}": Shape(None, status=201, takes_bytes=True),
    **exchange.SHAPES,
    **torch_download.SHAPES,
}


def routes(relay: RelayNode, all_routes: Callable[[], list[Route]]) -> list[Route]:
    """``all_routes`` returns the routes that ``/openapi.json`` describes."""
    here = _Admin(relay, all_routes)
    return [
        Route("GET", "/openapi.json", here.openapi, Access.OPEN, "this description"),
        Route("GET", CHECKPOINTS, here.list, Access.READ, "the checkpoints of a job"),
        Route("POST", CHECKPOINTS, here.begin, Access.WORKER, "begin an upload, or join one"),
        Route("GET", ONE, here.show, Access.READ, "one checkpoint, rank by rank"),
        Route("DELETE", ONE, here.remove, Access.ADMIN, "delete a checkpoint from every tier"),
        Route(
            "POST",
            f"{ONE}/plan",
            here.plan,
            Access.WORKER,
            "report the root of a rank; get its missing chunks",
        ),
        Route("POST", f"{ONE}/result", here.result, Access.WORKER, "report the success or failure of a rank"),
        Route("POST", f"{ONE}/commit", here.commit, Access.WORKER, "commit a complete checkpoint"),
        Route("POST", f"{ONE}/abort", here.abort, Access.WORKER, "abort an upload"),
        Route("GET", f"{ONE}/manifest", here.get_manifest, Access.READ, "the manifest of a rank"),
        Route("PUT", f"{ONE}/manifest", here.put_manifest, Access.WORKER, "upload the manifest of a rank"),
        Route("GET", f"{ONE}/holders", here.holders, Access.READ, "processes that serve chunks of a rank"),
        Route(
            "PUT",
            f"{ONE}/holders/{{name}}",
            here.put_holder,
            Access.WORKER,
            "announce served chunks; repeat it",
        ),
    ]


class _Admin:
    def __init__(self, relay: RelayNode, all_routes: Callable[[], list[Route]]) -> None:
        self._relay = relay
        self._all_routes = all_routes
        self._store = relay.checkpoints

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.json_response(openapi.describe("keepstep relay", self._all_routes(), SHAPES))

    # ---- an upload

    async def begin(self, request: web.Request) -> web.Response:
        job, body = requests.job(request), await read_body(request, BeginBody)
        key = Key(job, requests.name(body.id, "checkpoint"))
        if body.kind not in {kind.value for kind in Kind}:
            raise bad(f"invalid kind {body.kind[:40]!r}: expected live or durable")
        for name, value, lowest in (("step", body.step, 0), ("quorum_id", body.quorum_id, 0), ("ranks", body.ranks, 1)):
            if not lowest <= value < MAX_STEP:
                raise bad(f"invalid {name} {value!r:.40}: expected {lowest} <= {name} < 2^53")
        facts = Facts(body.step, Kind(body.kind), body.ranks, body.quorum_id, body.one_producer, body.open)
        rank = requests.rank(request) if "rank" in request.query else None
        again = request.query.get("again", "1")
        if again not in ("0", "1"):
            raise bad(f"invalid again {again[:40]!r}: expected 0 or 1")
        key = self._relay.core.to_begin(key, overwrite=body.overwrite)
        if body.overwrite and key.version and request[ROLE] not in Access.ADMIN.value:
            raise Problem(
                HTTPStatus.FORBIDDEN,
                f"{key.at(0)} is committed, and a {request[ROLE].value} token may not overwrite it: that deletes the "
                f"earlier one, which takes an admin token",
            )
        new = await self._store.begin(key, facts, rank, again=again == "1")
        return self._view(key, HTTPStatus.CREATED if new else HTTPStatus.OK)

    async def plan(self, request: web.Request) -> web.Response:
        key, body = requests.key(request, self._relay.core), await read_body(request, PlanBody)
        root = requests.from_hex(body.root, "root", ROOT_BYTES)
        if not 0 < len(body.producer) <= MAX_TEXT:
            raise bad(f"invalid producer: expected 1 to {MAX_TEXT} characters")
        self._relay.chunks.step(RootReported(key, body.rank, body.producer, root))
        return json_answer(plan_view(self._store, self._relay.core.checkpoint(key), body.rank, root))

    async def put_manifest(self, request: web.Request) -> web.Response:
        key, rank = requests.key(request, self._relay.core), requests.rank(request)
        self._relay.core.checkpoint(key)
        async with requests.manifest_body(request, self._relay) as manifest:
            await self._store.put_manifest(key, rank, manifest)
        one = self._relay.core.checkpoint(key)
        table = one.tables[rank]
        here = sum(table.length(n) for n, d in enumerate(table.digests) if self._relay.core.inventory.is_here(d))
        self._relay.traffic.deduplicated_bytes += here
        return json_answer(plan_view(self._store, one, rank, table.root), HTTPStatus.CREATED)

    async def result(self, request: web.Request) -> web.Response:
        key, body = requests.key(request, self._relay.core), await read_body(request, ResultBody)
        error = None if body.error is None else body.error[:MAX_TEXT]
        await self._store.report(RankReported(key, body.rank, error, body.part))
        if error is not None:
            raise Problem(HTTPStatus.GONE, f"{key} was aborted: rank {body.rank} failed: {error}")
        return self._view(key)

    async def commit(self, request: web.Request) -> web.Response:
        key = requests.key(request, self._relay.core)
        await self._store.commit(key)
        return self._view(key)

    async def abort(self, request: web.Request) -> web.Response:
        key, body = requests.key(request, self._relay.core), await read_body(request, AbortBody)
        await self._store.abort(key, body.reason[:MAX_TEXT])
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def remove(self, request: web.Request) -> web.Response:
        await self._store.remove(requests.key(request, self._relay.core), f"removed by {request[CALLER]}")
        return web.Response(status=HTTPStatus.NO_CONTENT)

    # ---- reads

    async def list(self, request: web.Request) -> web.Response:
        job, step = requests.job(request), number(request, "step", -1)
        found = [one for key, one in self._relay.core.checkpoints.items() if key.job == job and not one.replaced]
        views = sorted(
            (checkpoint_view(self._store, one) for one in found if step in (-1, one.facts.step)),
            key=lambda view: (view.step, view.begun),
        )
        committed = [view for view in views if view.committed is not None]
        latest = max(committed, key=lambda view: (view.quorum_id, view.step, view.begun), default=None)
        unreadable = (key.id for key in self._store.unreadable if key.job == job)
        return json_answer(CheckpointsView(job, latest, tuple(views), tuple(sorted(unreadable))))

    async def show(self, request: web.Request) -> web.Response:
        one = self._relay.core.checkpoint(requests.key(request, self._relay.core))
        return json_answer(detail_view(self._store, one))

    async def get_manifest(self, request: web.Request) -> web.StreamResponse:
        key, rank = requests.key(request, self._relay.core), requests.rank(request)
        await self._relay.has_manifest(key, rank, requests.wait(request, self._relay.settings.max_wait))
        self._relay.chunks.step(ReadFrom(key))
        manifest = memoryview(self._store.manifests[key, rank])
        response = await answers.begin(request, HTTPStatus.OK, manifest.nbytes, {})
        await answers.send(request, response, manifest, self._relay.settings.body_timeout)
        return response

    # ---- processes that serve chunks

    async def holders(self, request: web.Request) -> web.Response:
        one = self._relay.core.checkpoint(requests.key(request, self._relay.core))
        return json_answer(holders_view(self._store, one, requests.rank(request)))

    async def put_holder(self, request: web.Request) -> web.Response:
        key, body = requests.key(request, self._relay.core), await read_body(request, HolderBody)
        name = requests.name(request.match_info["name"], "holder")
        try:
            (address,) = split_addresses(body.address)
        except ValueError:
            raise bad(f"invalid address {body.address[:80]!r}: expected one http://host:port") from None
        has = requests.from_hex(body.has, "has")
        self._relay.chunks.step(HolderReported(key, body.rank, name, address, has))
        return json_answer(holders_view(self._store, self._relay.core.checkpoint(key), body.rank))

    def _view(self, key: Key, status: int = HTTPStatus.OK) -> web.Response:
        return json_answer(checkpoint_view(self._store, self._relay.core.checkpoint(key)), status)
