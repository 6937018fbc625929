"""Which event loop services and trainers run on."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Uvloop's where it is installed: half of asyncio's time for a frame, and for waking a loop from another thread."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop()

    class Loop(uvloop.Loop):
        async def getaddrinfo(self, host: Any, port: Any, **options: int) -> Any:
            """In a thread of Python's, as asyncio's loop does. Libuv would start threads of its own and join them at
            the end of the process, of a forked child too: that does not have them, and crashes.
            """
            return await self.run_in_executor(None, partial(socket.getaddrinfo, host, port, **options))

    return Loop()
