"""A service that answers the metrics API with what a test tells it, to look at the page in situations of any size.

Tests of the metrics service check what the answers mean; this file has only their form.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from keepstep_mesh.protocol.policy import Policy, policy_problem
from keepstep_mesh.security.tokens import Access, Tokens
from keepstep_mesh.serving.application import Route, read_json
from keepstep_mesh.serving.openapi import describe, plain
from keepstep_mesh.serving.rest import bad, checked
from keepstep_mesh.serving.service import Endpoint, Service, serving
from keepstep_metrics.api import dashboard_page, log_views
from keepstep_metrics.api.routes import JOB as ANY_JOB
from keepstep_metrics.api.routes import SHAPES
from keepstep_metrics.api.span_views import MAX_OWN_COLUMNS
from keepstep_metrics.history.events import Event
from keepstep_metrics.history.findings.marks import marks
from keepstep_metrics.history.stragglers import MIN_GROUPS
from tests.browser.devtools import Browser, chromium

JOB = "digits"
STEP_SECONDS = 0.25
WAITED = "the groups waited 3 % of their time for quorums with a slow group"
BADPUT = {"ELASTIC_REINITIALIZATION": 0.07, "OTHER": 0.0}
HTML = "<h1>It works!</h1>"

# JavaScript expressions
LIVE = "document.querySelector('#live').dataset.live === 'yes'"
SHOWN = f"{LIVE} && document.querySelectorAll('.shares li b').length"
HEADLINE = "document.querySelector('.headline').textContent"
PROBLEM = "document.querySelector('#problem:not([hidden])')?.textContent ?? ''"
TOAST = "document.querySelector('.toast')?.textContent"


def row(name: str) -> str:
    """A JavaScript expression: the text of a group's row."""
    return (
        f"[...document.querySelectorAll('.groups tr')].find((one) => one.textContent.startsWith('{name}')).textContent"
    )


@asynccontextmanager
async def shown(folder: Path, mesh: ToldMesh, tokens: Tokens | None = None) -> AsyncIterator[tuple[Browser, Endpoint]]:
    async with serving(mesh.service(), "127.0.0.1", 0, tokens=tokens) as endpoint, chromium(folder) as browser:
        yield browser, endpoint


class ToldMesh:
    """A job of so many groups that has trained for ``past`` seconds. ``turn`` changes what a group does.

    It answers for a job of any name.
    """

    def __init__(self, groups: int, past: float = 600.0) -> None:
        self.t0 = time.time() - past
        self.names = [f"trainer-{number}" for number in range(groups)]
        self.spans: dict[str, list[list[Any]]] = {name: [[self.t0, None, "training"]] for name in self.names}
        self.heals: dict[str, dict[str, Any]] = {}
        self.copies: dict[str, dict[str, Any]] = {}
        """Group -> copies of its shards, in a job whose model exists once."""
        self.events: list[dict[str, Any]] = []
        self.orders: list[tuple[str, str, dict[str, Any]]] = []
        self.failures: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        self.hangs: list[str] = []
        self.transfers: list[dict[str, Any]] = []
        self.waiting_for: str | None = None
        self.blame: dict[str, Any] | None = None
        self.alerts: list[dict[str, Any]] = []
        self.kept_out: list[str] = []
        self.policy = Policy()
        self.group_values: dict[str, float] = {}
        """Group -> its factor of the recorded value."""
        self.store = "etcd"
        self.value = "loss"
        """Values that its script records."""
        self.garbage = False
        """Whether it answers with a page of HTML."""
        self.held = asyncio.Event()
        """Unset: it answers nothing."""
        self.held.set()
        self._listeners: set[asyncio.Queue[tuple[str, dict[str, Any]] | None]] = set()

    # ---- what happens

    def turn(self, name: str, state: str, t: float | None = None) -> None:
        t = t or time.time()
        self.spans[name][-1][1] = t
        self.spans[name].append([t, None, state])
        self.tell_now()

    def leave(self, name: str) -> None:
        self.names.remove(name)
        del self.spans[name]
        self.tell_now()

    def cut(self) -> None:
        """Ends all streams."""
        for listener in self._listeners:
            listener.put_nowait(None)

    def happened(self, event: str, name: str, sentence: str, t: float | None = None) -> None:
        told = {"id": len(self.events) + 1, "t": t or time.time(), "event": event, "name": name}
        self.events.append({**told, "sentence": sentence, "detail": {}})
        self.tell("event", self.events[-1])

    def tell_now(self) -> None:
        self.tell("now", self.now())

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener.put_nowait((kind, data))

    # ---- what is answered

    def step(self, t: float) -> int:
        return int((t - self.t0) / STEP_SECONDS)

    def now(self) -> dict[str, Any]:
        t = time.time()
        training = [name for name in self.names if self.spans[name][-1][2] == "training"]
        groups = [
            {
                "name": name,
                "replica_id": f"{name}:1",
                "state": self.spans[name][-1][2],
                "since": self.spans[name][-1][0],
                "step": self.step(t),
                "step_seconds_p50": STEP_SECONDS + 0.001 * (index % 7),
                "straggler": index == 5,
                "heal": self.heals.get(name),
                "loss": 2.3 * math.exp(-self.step(t) / 900),
                "busy_seconds": STEP_SECONDS + 0.001 * (index % 7),
                "host": "10.0.0.7",
                "restarts": index,
                "failed_heals": 14 if index == 1 else 0,
                "error": "failed to heal: no route" if index == 1 else "",
                "error_at": t - 60,
                "copies": self.copies.get(name),
            }
            for index, name in enumerate(self.names)
        ]
        joining = [name for name in self.names if self.spans[name][-1][2] == "healing"]
        number = 1 + sum(len(spans) - 1 for spans in self.spans.values())
        numbers = {"step": self.step(t), "quorum_id": number, "epoch": 1, "waiting_for": self.waiting_for}
        numbers |= {"steps_per_second": 1 / STEP_SECONDS, "loss": 0.25, "committed_at": t - 2, "needs": 1}
        numbers |= {"blame": self.blame, "alerts": self.alerts, "kept_out": self.kept_out, "state": None}
        numbers["hangs"] = self.hangs
        return {"job": JOB, "t": t, **numbers, "participants": training, "joining": joining, "groups": groups}

    def timeline(self, since: float, until: float) -> dict[str, Any]:
        groups = []
        for name, spans in self.spans.items():
            cut = [[max(since, a), min(until, b or until), state] for a, b, state in spans if (b or until) > since]
            whole = sum(b - a for a, b, _ in cut) or 1
            shares: dict[str, float] = {}
            for a, b, state in cut:
                shares[state] = shares.get(state, 0) + (b - a) / whole
            groups.append({"name": name, "spans": cut, "shares": shares, "slow": []})
        return {"job": JOB, "since": since, "until": until, "groups": groups}

    def steps(self, since: float, until: float, points: int, names: list[str]) -> dict[str, Any]:
        wide = (until - since) / points
        t = [since + wide * (i + 0.5) for i in range(points)]
        seen = [self.t0 <= one for one in t]

        def column(make) -> list[float | None]:
            return [make(one) if there else None for one, there in zip(t, seen, strict=True)]

        def wave(one: float) -> float:
            return 0.01 * math.sin(one / 9) + 0.004 * math.sin(one * 3.1)

        return {
            "job": JOB,
            "t": t,
            "step": column(self.step),
            "committed_per_second": [1 / (STEP_SECONDS + wave(at)) if self.t0 <= at else 0.0 for at in t],
            "seconds": {
                name: column(lambda one, i=i: STEP_SECONDS + wave(one + i))
                for i, name in enumerate(names or (self.names if len(self.names) <= MAX_OWN_COLUMNS else ()))
            },
            "quantiles": {
                "p50": column(lambda one: STEP_SECONDS + wave(one)),
                "p90": column(lambda one: STEP_SECONDS * 1.1 + wave(one)),
                "p99": column(lambda one: STEP_SECONDS * 1.3 + 2 * abs(wave(one))),
            },
            "values": {self.value: column(lambda one: 2.3 * math.exp(-self.step(one) / 900) + abs(wave(one)))},
            "group_values": {self.value: {name: column(lambda _, x=x: x) for name, x in self.group_values.items()}},
            "marks": [asdict(one) for one in marks(self.log(), since, until, wide)],
        }

    def log(self) -> list[Event]:
        return [Event(**one) for one in self.events]

    def goodput(self, since: float, until: float) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        for group in self.timeline(since, until)["groups"]:
            for a, b, state in group["spans"]:
                seconds[state] = seconds.get(state, 0) + b - a
        shares = {state: one / (sum(seconds.values()) or 1) for state, one in seconds.items()}
        numbers = {"steps_committed": self.step(until), "steps_discarded": len(self.failures)}
        numbers |= {"failures": len(self.failures), "mean_time_to_recover": 0.8, "mean_time_to_return": 20.0}
        numbers |= {"sentence": f"goodput {100 * shares.get('training', 0):.0f} %; {WAITED}"}
        return {"goodput": shares.get("training"), "shares": shares, "seconds": seconds, "badput": BADPUT, **numbers}

    def stragglers(self) -> dict[str, Any]:
        rows = [
            {"name": name, "seconds": STEP_SECONDS * (1.4 if i == 5 else 1), "score": 8.2 if i == 5 else 0.1 * (i % 7),
             "straggler": i == 5, "since": self.t0 + 60 if i == 5 else None}
            for i, name in enumerate(self.names)
        ]  # fmt: skip
        few = len(rows) < MIN_GROUPS
        middle = {"median_seconds": None if few else STEP_SECONDS, "mad_seconds": None if few else 0.004}
        return {**middle, "groups": rows}

    # ---- the service

    def service(self) -> Service:
        def answer(make):
            async def handle(request: web.Request) -> web.Response:
                await self.held.wait()
                if self.garbage:
                    return web.Response(text=HTML, content_type="text/html")
                until = float(request.query.get("until", time.time()))
                since = float(request.query.get("since", until - 900))
                names = [request.query.getall("group", [])] if make == self.steps else []
                return web.json_response(make(since, until, int(request.query.get("points", 300)), *names))

            return handle

        async def order(request: web.Request) -> web.Response:
            name, action = request.match_info.get("name", ""), request.match_info.get("action", "policy")
            self.orders.append((action, name, await read_json(request)))
            if action == "policy":
                wanted = replace(self.policy, **checked(self.orders[-1][2], Policy))
                if (problem := policy_problem(wanted)) is not None:
                    raise bad(problem)
                self.policy = wanted
            return web.json_response({"sentence": f"{name}: {action} is done"}, status=202)

        about = {"job": JOB, "first_seen": self.t0, "groups": len(self.names), "goodput": 0.97}
        about |= {"pace": [0.0, 4.0, 2.0], "steps_per_second": 4.0, "alerts": self.alerts}
        vitals = {"version": "0.1.0", "python": "3.11.7", "resident_bytes": 1 << 26, "started": self.t0,
                  "used_bytes": 1 << 29, "limit_bytes": 1 << 30, "stored_bytes": 1, "received_per_second": 2 << 20,
                  "sent_per_second": 5 << 20}  # fmt: skip
        cluster = {
            "lighthouses": [
                {"address": "http://10.0.0.1:29510", "leader": True, "epoch": 3, "trouble": None, "vitals": vitals},
                {"address": "http://10.0.0.2:29510", "leader": False, "epoch": 3, "trouble": None, "vitals": None},
            ],
            "services": [
                {"kind": "relay", "name": "relay-1", "address": "http://10.0.0.3:29520",
                 "details": {"disk": True, "memory_bytes": 1 << 30}, "vitals": vitals},
            ],
            "store": self.store,
            "store_trouble": None,
            "store_seconds": 0.0021,
            "states": {JOB: {"code": "standing", "step": 9, "since": self.t0, "why": "waiting for 1 of 3"}},
        }  # fmt: skip
        answers = {
            "/v1/jobs": lambda *_: {"jobs": [{**about, "last_seen": time.time(), "step": self.step(time.time())}]},
            "/v1/cluster": lambda *_: cluster,
            f"{ANY_JOB}/now": lambda *_: self.now(),
            f"{ANY_JOB}/timeline": lambda since, until, _: self.timeline(since, until),
            f"{ANY_JOB}/steps": self.steps,
            f"{ANY_JOB}/goodput": lambda since, until, _: self.goodput(since, until),
            f"{ANY_JOB}/stragglers": lambda *_: self.stragglers(),
            f"{ANY_JOB}/transfers": lambda *_: {"transfers": self.transfers},
            f"{ANY_JOB}/failures": lambda *_: {"failures": self.failures, "ends": self.ends},
            f"{ANY_JOB}/incidents": lambda *_: plain(log_views.incidents(JOB, self.log()[-500:])),
            ANY_JOB: lambda *_: {"policy": asdict(self.policy)},
            "/openapi.json": lambda *_: describe("told", routes, SHAPES),
        }
        routes = [Route("GET", path, answer(make), Access.READ) for path, make in answers.items()]
        routes += [
            *dashboard_page.routes(),
            Route("GET", "/v1/stream", self._stream, Access.READ),
            Route("POST", f"{ANY_JOB}/replicas/{{name}}/{{action}}", order, Access.ADMIN),
            Route("POST", f"{ANY_JOB}/{{action}}", order, Access.ADMIN),
            Route("PATCH", ANY_JOB, order, Access.ADMIN),
        ]
        return Service("metrics", routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.held.set()
            self.cut()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.garbage:
            return web.Response(text=HTML, content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        heard: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        self._listeners.add(heard)
        try:
            if request.query.get("job"):
                heard.put_nowait(("now", self.now()))
            while news := await heard.get():
                kind, data = news
                await response.write(f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode())
        finally:
            self._listeners.discard(heard)
        return response
