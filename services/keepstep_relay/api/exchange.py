"""Ranks of one upload that wait for each other: they exchange layouts first, and learn of the commit at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.openapi import Shape
from keepstep_mesh.serving.rest import json_answer
from keepstep_relay.api import answers, requests
from keepstep_relay.core.checkpoint import Checkpoint
from keepstep_relay.core.events import RankWaits, RefusedError, State
from keepstep_relay.node import RelayNode

SIGN_OF_LIFE_SECONDS = 10.0
"""Interval at which a waiting rank counts as alive."""
ONE = "/v1/jobs/{job}/checkpoints/{id}"
WAITING = {
    "rank": "rank that waits; the request is its heartbeat; default: 0",
    "wait": "seconds to wait, at most 60",
}


@dataclass(frozen=True, slots=True)
class LayoutsView:
    digests: tuple[str | None, ...]
    """Of each rank's layout, in hex; None: not reported."""


@dataclass(frozen=True, slots=True)
class StateView:
    state: State
    reported: bool
    """False: the relay has no ``result`` of this rank, perhaps because it has restarted."""
    layout_wanted: bool
    """True: another rank waits for the layout of this one, because the relay has restarted between the two."""


SHAPES = {
    f"PUT {ONE}/layout": Shape(LayoutsView, status=201, query={"rank": "default: 0"}, takes_bytes=True),
    f"GET {ONE}/layouts": Shape(LayoutsView, query=WAITING),
    f"GET {ONE}/layouts/{{digest}}": Shape(None, gives_bytes=True),
    f"GET {ONE}/state": Shape(StateView, query=WAITING),
}


def routes(relay: RelayNode) -> list[Route]:
    here = _Exchange(relay)
    return [
        Route("PUT", f"{ONE}/layout", here.put_layout, Access.WORKER, "report what a rank holds"),
        Route(
            "GET",
            f"{ONE}/layouts",
            here.layouts,
            Access.WORKER,
            "digests of all layouts; with ?wait= until all are here",
        ),
        Route("GET", f"{ONE}/layouts/{{digest}}", here.layout, Access.WORKER, "a layout"),
        Route(
            "GET",
            f"{ONE}/state",
            here.state,
            Access.WORKER,
            "the state; with ?wait= and after the result of the rank, until the upload has ended",
        ),
    ]


class _Exchange:
    def __init__(self, relay: RelayNode) -> None:
        self._relay = relay
        self._store = relay.checkpoints

    async def put_layout(self, request: web.Request) -> web.Response:
        key, rank = requests.key(request, self._relay.core), requests.rank(request)
        self._relay.core.checkpoint(key)
        async with requests.manifest_body(request, self._relay) as layout:
            await self._store.put_layout(key, rank, layout)
        return json_answer(_view(self._relay.core.checkpoint(key)), HTTPStatus.CREATED)

    async def layouts(self, request: web.Request) -> web.Response:
        one = await self._wait(request, lambda one: len(one.layouts) == one.facts.ranks)
        return json_answer(_view(one))

    async def layout(self, request: web.Request) -> web.StreamResponse:
        key, digest = requests.key(request, self._relay.core), requests.digest(request)
        layout = self._store.layouts.get((key, digest))
        if layout is None:
            self._relay.core.checkpoint(key)
            raise Problem(HTTPStatus.NOT_FOUND, f"layout {digest.hex()} of {key} not found")
        response = await answers.begin(request, HTTPStatus.OK, len(layout), {})
        await answers.send(request, response, memoryview(layout), self._relay.settings.body_timeout)
        return response

    async def state(self, request: web.Request) -> web.Response:
        rank = requests.rank(request)

        def wanted(one: Checkpoint) -> bool:
            return one.committed_at is None and bool(one.layouts) and rank not in one.layouts

        def over(one: Checkpoint) -> bool:
            return one.committed_at is not None or wanted(one) or not (rank in one.reported or one.sealing)

        try:
            one = await self._wait(request, over)
        except RefusedError:
            if not self._relay.core.was_committed(requests.key(request, self._relay.core)):
                raise
            return json_answer(StateView(State.COMMITTED, reported=True, layout_wanted=False))
        return json_answer(StateView(one.state, rank in one.reported, wanted(one)))

    async def _wait(self, request: web.Request, over: Callable[[Checkpoint], bool]) -> Checkpoint:
        """Wait until ``over``, at most ``?wait=``. Raises ``RefusedError`` if the upload was aborted."""
        key, rank = requests.key(request, self._relay.core), requests.rank(request)
        loop = asyncio.get_running_loop()
        end = loop.time() + requests.wait(request, self._relay.settings.max_wait)
        while True:
            one = self._relay.core.checkpoint(key)
            self._relay.checkpoints.step(RankWaits(key, rank))
            if over(one) or loop.time() >= end:
                return one
            self._relay.check_waits()
            try:
                await self._relay.chunks.notifier.wait(key, min(end, loop.time() + SIGN_OF_LIFE_SECONDS))
            except TimeoutError:
                continue


def _view(one: Checkpoint) -> LayoutsView:
    found = [one.layouts.get(rank) for rank in range(one.facts.ranks)]
    return LayoutsView(tuple(None if digest is None else digest.hex() for digest in found))
