"""A rendezvous over HTTP, and calls of it that block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta

from aiohttp import web

from keepstep.rendezvous.store_client import KeyValueServer, Table

LONG = timedelta(minutes=10)
NEW = Table("job", 1, 7, 0)


@contextlib.asynccontextmanager
async def served(server: KeyValueServer, port: int = 0) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1024)  # the server has its own limit
    app.add_routes(server.routes())
    runner = web.AppRunner(app, lingering_time=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()
        await runner.cleanup()


async def call(function, *args):
    """Run a function that blocks in a thread."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), 60)


async def begun(awaitable: Awaitable[object]) -> asyncio.Task[object]:
    """Return a task that was given time to get to where it waits."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0.2)  # no event shows that a thread waits; too short, the test sees less and passes
    assert not task.done()
    return task
