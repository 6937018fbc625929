"""A lighthouse with a job of a few groups, and its REST surface from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from keepstep_lighthouse.app import Lighthouse
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.lighthouse_driver import DEADLINE, Worker, lighthouse, round_of, workers

JOB = "/v1/jobs/job"


class Rest:
    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self.http = http
        self.address = address

    async def get(self, path: str, status: int = 200) -> Any:
        return await self.call("GET", path, status)

    async def post(self, path: str, body: Any = None, status: int = 202) -> Any:
        return await self.call("POST", path, status, json=body)

    async def patch(self, path: str, body: Any, status: int = 202) -> Any:
        return await self.call("PATCH", path, status, json=body)

    async def call(self, method: str, path: str, status: int, **arguments: Any) -> Any:
        async with asyncio.timeout(DEADLINE), self.http.request(method, self.address + path, **arguments) as response:
            body = await response.json(content_type=None)
            assert response.status == status, body
            if status >= 400:
                assert response.content_type == "application/problem+json"
                assert body["status"] == status
            return body


@asynccontextmanager
async def scene(count: int = 2, **settings: Any) -> AsyncIterator[tuple[Lighthouse, Rest, list[Worker]]]:
    """A lighthouse and a job of ``count`` groups that had their first quorum."""
    settings = {"policy": Policy(min_replicas=1, reconnect_grace=DEADLINE), **settings}
    async with (
        lighthouse(**settings) as one,
        aiohttp.ClientSession() as http,
        workers(one.address, count) as members,
    ):
        if members:
            await round_of(members)
        yield one, Rest(http, one.address), members
