"""The told service answers each request of the page as the real one does. It may leave out fields."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from jsonschema import Draft202012Validator

from keepstep_mesh.serving.openapi import describe
from keepstep_mesh.serving.service import all_routes, serving
from keepstep_metrics.api.routes import SHAPES
from keepstep_metrics.app import Metrics, MetricsSettings
from tests.browser.told import JOB, ToldMesh

NOT_OF_THE_PAGE = {"/metrics", "/v1/jobs/{job}/events"}
DOCUMENT = describe("real", all_routes(Metrics(MetricsSettings()).service()), SHAPES)
for one in DOCUMENT["components"]["schemas"].values():
    one.pop("required", None)
    one.setdefault("additionalProperties", False)
READ = sorted(path for path, of in DOCUMENT["paths"].items() if "get" in of and path not in NOT_OF_THE_PAGE)


@pytest.mark.parametrize("path", READ)
async def test_each_answer_has_the_form_of_the_real_one(path: str) -> None:
    mesh = ToldMesh(2)
    mesh.copies["trainer-1"] = {"keepers": ["trainer-0"], "exposed": "", "bytes": 1}
    mesh.happened("lost", "trainer-1", "trainer-1 was lost: killed")
    url = path.format(job=JOB, file="app.js" if "vendor" not in path else "uPlot.min.css")
    async with (
        serving(mesh.service(), "127.0.0.1", 0) as endpoint,
        aiohttp.ClientSession() as http,
        http.get(endpoint.url + url) as answer,
    ):
        assert answer.status == 200
        content: dict[str, Any] = DOCUMENT["paths"][path]["get"]["responses"]["200"].get("content", {})
        if (told := content.get("application/json")) is not None:
            schema = {**told["schema"], "components": DOCUMENT["components"]}
            Draft202012Validator(schema).validate(await answer.json())
