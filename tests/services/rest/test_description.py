"""The description (``/openapi.json``) tells the truth: routes, roles, bodies, answers, problems."""

from __future__ import annotations

import io
import re
from typing import Any

import aiohttp
import openapi_spec_validator
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator

from keepstep_mesh.protocol.messages import Healing
from keepstep_mesh.serving import service
from keepstep_mesh.serving.application import application
from tests.services.rest.routes import ACCESS, BODIES, LAST, SESSIONS, url_of
from tests.services.rest.scene import scene
from tests.support.services.access_table import TOKENS
from tests.support.services.lighthouse_driver import eventually, lighthouse


async def test_the_description_is_openapi_and_has_what_the_router_has(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[web.Application] = []

    def kept(*arguments: Any, **how: Any) -> web.Application:
        served.append(application(*arguments, **how))
        return served[-1]

    monkeypatch.setattr(service, "application", kept)
    async with scene(0) as (_, rest, _members):
        document = await rest.get("/openapi.json")
    openapi_spec_validator.validate(document)
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    routed = {(route.method, route.resource.canonical) for route in served[0].router.routes() if route.resource}
    assert described == routed == set(ACCESS)
    force = document["paths"]["/v1/jobs/{job}"]["delete"]["parameters"][1]
    assert (force["name"], force["schema"]) == ("force", {"type": "boolean"})
    for (method, path), roles in ACCESS.items():
        operation = document["paths"][path][method.lower()]
        named = [one["name"] for one in operation.get("parameters", []) if one["in"] == "path"]
        assert named == re.findall(r"\{(\w+)\}", path)
        if roles != "anybody" and path != "/metrics":
            assert operation["x-roles"] == sorted(roles.split())
        assert ("security" in operation) == (roles != "anybody")
        taken = BODIES.get((method, path))
        assert ("requestBody" in operation) == (taken is not None or path.endswith(("/readmit", "/verify", "/reopen")))
        if taken is not None:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            Draft202012Validator({**schema, "components": document["components"]}).validate(taken)


class Described:
    """Checks answers against the description. A field that it does not name is an error, bar those of a problem."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        for schema in document["components"]["schemas"].values():
            schema.setdefault("additionalProperties", False)

    def check(self, method: str, path: str, status: int, content_type: str, body: Any) -> None:
        responses = self._document["paths"][path][method.lower()]["responses"]
        assert status >= 400 or str(status) in responses, (method, path, status)
        content = responses.get(str(status), responses["default"]).get("content", {})
        if status >= 400 or "application/json" in content:
            schema = content[content_type]["schema"]
            Draft202012Validator({**schema, "components": self._document["components"]}).validate(body)


async def test_every_answer_is_as_described() -> None:
    async with scene(3) as (one, rest, members):
        described = Described(await rest.get("/openapi.json"))
        await members[0].ask(1)
        await members[1].send(Healing(5, 10, 2.0, 1, "r0:1", "direct"))
        await eventually(lambda: one.jobs["job"].core.heals(0.0))
        page = ("GET", "/")  # of the metrics service, which is not there
        reads = [one for one in ACCESS if one[0] == "GET" and one not in {*SESSIONS, page}]
        assert {*reads, *BODIES, *SESSIONS, page, LAST} == set(ACCESS)
        for method, path in (*reads, *BODIES, *reads, LAST):
            whom = {"straggler": "r0:1", "drain": "r2"}.get(path.rpartition("/")[2], "r1")
            url = rest.address + url_of(path, replica_id=whom) + ("?force=true" if (method, path) == LAST else "")
            async with rest.http.request(method, url, json=BODIES.get((method, path))) as answer:
                if path.endswith(("/reopen", "/replace", "/{number}")):
                    assert answer.status in (404, 409)  # the job is open, and has neither a spare nor this incident
                    continue
                assert answer.status < 300, (method, path, await answer.text())
                body = await answer.json() if answer.content_type == "application/json" else None
                described.check(method, path, answer.status, answer.content_type, body)


@pytest.mark.parametrize(
    ("token", "job", "data", "statuses"),
    [
        (None, "job", None, {401, 404}),
        (TOKENS.worker, "job", None, {400, 403, 404}),
        (TOKENS.admin, "elsewhere", b"{}", {400, 404}),
        (TOKENS.admin, "job", b"{", {400, 404}),
        (TOKENS.admin, "job", b" " * 2_000_000, {400, 404, 413}),
    ],
)
async def test_every_problem_is_as_described(
    token: str | None, job: str, data: bytes | None, statuses: set[int]
) -> None:
    async with lighthouse(tokens=TOKENS) as one, aiohttp.ClientSession() as http:
        async with http.get(f"{one.address}/openapi.json") as answer:
            described = Described(await answer.json())
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        met = set()
        for method, path in ACCESS:
            url = one.address + url_of(path, job)
            body = io.BytesIO(data) if data is not None and method != "GET" else None
            async with http.request(method, url, headers=headers, data=body) as answer:
                if answer.status >= 400:
                    assert answer.content_type == "application/problem+json", (method, path)
                    problem = await answer.json(content_type=None)
                    assert problem["status"] == answer.status
                    described.check(method, path, answer.status, answer.content_type, problem)
                    met.add(answer.status)
        assert met == statuses
