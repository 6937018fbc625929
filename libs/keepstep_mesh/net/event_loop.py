"""The event loop of services and trainers, and the end of its tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
from typing import Any

from keepstep_mesh.threads.starting import Thread


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Uvloop's where it is installed: half of asyncio's time for a frame, and for waking a loop from another thread."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop()

    class Loop(uvloop.Loop):
        async def getaddrinfo(self, host: Any, port: Any, **options: int) -> Any:
            return await _look_up(host, port, **options)

    return Loop()


async def _look_up(*to: Any, **options: Any) -> Any:
    """``socket.getaddrinfo``: of an address at once, of a name in a daemon thread.

    The end of the process waits for no daemon. Libuv joins the threads of its own pool there, in a forked child too,
    which does not have them: it crashes.
    """
    with contextlib.suppress(OSError):  # a name
        return socket.getaddrinfo(*to, **{**options, "flags": options.get("flags", 0) | socket.AI_NUMERICHOST})
    found: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def look() -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled before
            try:
                found.set_result(socket.getaddrinfo(*to, **options))
            except Exception as error:  # noqa: BLE001  raised where it is awaited
                found.set_exception(error)

    Thread(target=look, name="keepstep-lookup", daemon=True).start()
    return await asyncio.wrap_future(found)


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel ``task`` and wait for its end. Raises its error, if it failed."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
