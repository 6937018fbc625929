"""A collector of OTLP/HTTP: decodes what comes with the messages of opentelemetry-proto, and keeps it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

DEADLINE = 60.0


def values_of(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class Collector:
    def __init__(self) -> None:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.address = ""
        self.spans: list[dict[str, Any]] = []
        self.logs: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._messages: dict[str, Any] = {"/v1/traces": ExportTraceServiceRequest, "/v1/logs": ExportLogsServiceRequest}
        self._news = asyncio.Event()

    async def receive(self, request: web.Request) -> web.Response:
        message = self._messages[request.path].FromString(await request.read())
        self.headers.append(dict(request.headers))
        for of_resource in getattr(message, "resource_spans", ()):
            resource = values_of(of_resource.resource.attributes)
            self.spans += [self._span(one, resource) for scope in of_resource.scope_spans for one in scope.spans]
        for of_resource in getattr(message, "resource_logs", ()):
            resource = values_of(of_resource.resource.attributes)
            self.logs += [self._log(one, resource) for scope in of_resource.scope_logs for one in scope.log_records]
        self._news.set()
        return web.Response(content_type="application/x-protobuf")

    @staticmethod
    def _span(one: Any, resource: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": one.name, "trace": one.trace_id.hex(), "id": one.span_id.hex(), "parent": one.parent_span_id.hex(),
            "began": one.start_time_unix_nano, "ended": one.end_time_unix_nano, "error": one.status.message,
            "status": one.status.code, "resource": resource, **values_of(one.attributes),
        }  # fmt: skip

    @staticmethod
    def _log(one: Any, resource: dict[str, Any]) -> dict[str, Any]:
        return {
            "body": one.body.string_value, "event": one.event_name, "severity": one.severity_text,
            "trace": one.trace_id.hex(), "id": one.span_id.hex(), "resource": resource, **values_of(one.attributes),
        }  # fmt: skip

    async def until(self, holds: Callable[[Collector], Any]) -> Any:
        """Wait until ``holds`` returns something true, and return it."""
        async with asyncio.timeout(DEADLINE):
            while not (found := holds(self)):
                self._news.clear()
                await self._news.wait()
        return found


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    one, app = Collector(), web.Application()
    app.router.add_post("/v1/{signal}", one.receive)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        one.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield one
    finally:
        await runner.cleanup()
