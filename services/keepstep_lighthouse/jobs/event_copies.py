"""Copy the events of the other lighthouses of a store, so that each lighthouse can show those of all terms.

Each lighthouse streams all events that it has in memory, its own and its copies, to each other one, and then each new
event. A lighthouse that was restarted gets the events of before from the others. A copy is in memory only: the file of
``--event-log`` has the events of its own lighthouse.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection

import aiohttp

from keepstep_lighthouse.jobs.event_log import EventLog, Happened
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.net.http import Identity, raise_for_problem

PATH = "/v1/lighthouses/events"
LOOK_SECONDS = 0.5
"""Interval in which new lighthouses are noticed, and pause after a stream broke."""
SILENT_SECONDS = 30.0
"""A stream that sends nothing for this time is opened again; the other side sends a comment more often."""
MAX_LINE_BYTES = 8 * 1024 * 1024

log = get_logger("keepstep.lighthouse.events")


class EventCopies:
    """``others`` returns the base URLs of the other lighthouses as of now."""

    def __init__(self, events: EventLog, others: Callable[[], Collection[str]], identity: Identity) -> None:
        self._events = events
        self._others = others
        self._identity = identity

    async def run(self) -> None:
        """Copy until cancelled."""
        copying: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                others = set(self._others())
                for address in copying.keys() - others:
                    await cancelled(copying.pop(address))
                for address in others - copying.keys():
                    copying[address] = asyncio.create_task(self._copy(address), name="keepstep event copies")
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in copying.values():
                await cancelled(task)

    async def _copy(self, address: str) -> None:
        after = 0
        while True:
            try:
                async with (
                    self._identity.session(timeout=None) as http,
                    http.get(
                        f"{address}{PATH}",
                        params={"after": str(after)},
                        timeout=aiohttp.ClientTimeout(sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS),
                        read_bufsize=MAX_LINE_BYTES,
                    ) as answer,
                ):
                    await raise_for_problem(answer)
                    async for line in answer.content:
                        if line.startswith(b"data: "):
                            happened = Happened(**json.loads(line.removeprefix(b"data: ")))
                            self._events.copy(happened)
                            after = max(after, happened.id)
            except (aiohttp.ClientError, OSError, KeepstepError, ValueError, TypeError) as error:
                # LeaderLink warns of a wrong token or certificate, which have the same effect there.
                log.debug("events of another lighthouse are not copied; retrying", address=address, reason=str(error))
            await asyncio.sleep(LOOK_SECONDS)
