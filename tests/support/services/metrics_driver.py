"""A metrics service in the test's loop or in its own process, senders driven by hand, and a reader of its stream."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import msgpack

from keepstep_metrics.app import Metrics, MetricsSettings
from tests.support.services.command import service_process

DEADLINE = 60.0
JOB = "job"
metrics_process = partial(service_process, "metrics")


@asynccontextmanager
async def metrics(**settings: Any) -> AsyncIterator[Metrics]:
    one = Metrics(MetricsSettings(**{"bind": "127.0.0.1:0", **settings}))
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


def step(t: float, number: int, seconds: float = 1.0, *, committed: bool = True, **more: Any) -> dict[str, Any]:
    said = {"quorum_id": 1, "reason": "", "participants": 1, "quorum_seconds": 0.0, "heal_seconds": 0.0, **more}
    return {"kind": "step", "t": t, "step": number, "seconds": seconds, "committed": committed, **said}


EVENT_NUMBERS = itertools.count(1)


def event(t: float, kind: str, replica_id: str = "", job: str = JOB, **detail: Any) -> dict[str, Any]:
    said = {"id": next(EVENT_NUMBERS), "job": job, "replica_id": replica_id, "epoch": 1}
    return {"kind": "event", "t": t, "event": kind, "detail": detail, **said}


class Teller:
    """A sender driven by hand. ``name``: a replica_id, or the name of a lighthouse."""

    def __init__(self, name: str = "", job: str = JOB) -> None:
        source = {"source": "worker", "name": name, "job": job} if name else {"source": "lighthouse", "name": "l"}
        self._head = {**source, "boot": uuid.uuid4().hex, "dropped": 0}
        self._first = 1

    def batch(self, *records: dict[str, Any]) -> bytes:
        body: bytes = msgpack.packb({**self._head, "first": self._first, "records": list(records)})
        self._first += len(records)
        return body


class Client:
    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self.http = http
        self.address = address

    async def call(self, method: str, path: str, status: int = 200, **how: Any) -> Any:
        async with asyncio.timeout(DEADLINE), self.http.request(method, self.address + path, **how) as answer:
            body = await answer.read()
            assert answer.status == status, (answer.status, body[:1000])
            if status >= 400:
                assert answer.content_type == "application/problem+json"
            return json.loads(body) if "json" in answer.content_type else body

    async def get(self, path: str, job: str = JOB) -> Any:
        """Get a path below the job."""
        return await self.call("GET", f"/v1/jobs/{job}/{path}")

    async def tell(self, teller: Teller, *records: dict[str, Any]) -> int:
        taken: int = (await self.call("POST", "/v1/ingest", data=teller.batch(*records)))["accepted"]
        return taken

    async def until(self, path: str, true: Callable[[Any], Any], job: str = JOB) -> Any:
        """Poll until ``true(answer)``; return that answer."""
        last = None
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    async with self.http.get(f"{self.address}/v1/jobs/{job}/{path}") as answer:
                        last = await answer.json(content_type=None)
                        if answer.status == 200 and true(last):
                            return last
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{path}: no answer met the condition; the last: {str(last)[:3000]}") from None


@asynccontextmanager
async def client(address: str, token: str | None = None) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as http:
        yield Client(http, address)


@asynccontextmanager
async def following(
    at: Client, job: str = JOB, after: int | None = None
) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Yield the stream of a job as (event, data), without pings."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    async with at.http.get(f"{at.address}/v1/stream?job={job}", headers=headers, timeout=timeout) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"

        async def messages() -> AsyncIterator[tuple[str, Any]]:
            kind = ""
            async for line in answer.content:
                name, _, value = line.decode().strip().partition(": ")
                if name == "event":
                    kind = value
                elif name == "data" and kind != "ping":
                    yield kind, json.loads(value)

        yield messages()
