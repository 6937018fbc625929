"""The network of a test: what a process sends of its state leaves it through an uplink of so many bytes a second."""

from __future__ import annotations

import asyncio
import socket
import time
from datetime import timedelta
from typing import Any

from keepstep.checkpointing import RelayTransport

PACKET_BYTES = 16 << 10


class LimitedUplink(RelayTransport[dict[str, Any]]):
    """All connections of its server share ``bytes_per_second``, packet by packet. ``sent``: bytes so far."""

    def __init__(self, timeout: timedelta, bytes_per_second: float) -> None:
        super().__init__(timeout, relays=list, num_chunks=4, hostname="127.0.0.1")
        self._rate = bytes_per_second
        self._free_at = 0.0
        self.sent = 0
        loop = self.direct.server._loop
        self._really_send = loop.sock_sendall
        loop.sock_sendall = self._send  # type: ignore[method-assign]

    async def _send(self, connection: socket.socket, data: Any) -> None:
        view = memoryview(data)
        for start in range(0, len(view), PACKET_BYTES):
            packet = view[start : start + PACKET_BYTES]
            now = time.monotonic()
            begin = max(self._free_at, now - 0.02)
            self._free_at = begin + len(packet) / self._rate
            if begin > now:
                await asyncio.sleep(begin - now)  # the limit that the test is about
            await self._really_send(connection, packet)
            self.sent += len(packet)
