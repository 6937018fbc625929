"""What a process tells the metrics service: records, in batches, in the background.

Nobody waits for it: a record goes into a bounded queue (``Outbox``, pure), and when the metrics service is away the
oldest are dropped, and counted. A batch is sent until it is taken, or refused for good, one at a time; each record has
a number, so that one that came twice is counted once.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import msgpack

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import AuthError, KeepstepError
from keepstep_mesh.net.http import Identity, Problem, raise_for_problem
from keepstep_mesh.security.tls import explained
from keepstep_mesh.security.tokens import place_of

PATH = "/v1/ingest"
MAX_QUEUED = 20_000
MAX_QUEUED_BYTES = 16 * 1024 * 1024
MAX_BATCH_BYTES = 512 * 1024
MAX_RECORD_BYTES = 256 * 1024
"""A larger record is dropped; the list of the members of a quorum is the longest that there is."""
NEVER_TAKEN = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""Answers to a batch that is no better the next time."""
REQUEST_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""After a batch that was not taken; doubled each time."""
LOG_AGAIN_SECONDS = 60.0

Record = dict[str, Any]
"""``t`` (Unix seconds), ``kind``, and what the kind adds."""

log = get_logger("keepstep.telemetry")


class Outbox:
    """Records that wait, packed. Any thread may add."""

    def __init__(self, limit: int = MAX_QUEUED) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._first = 1
        """Number of the oldest record that waits."""
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, record: Mapping[str, Any]) -> None:
        """Never raises: what cannot be packed is dropped."""
        try:
            packed: bytes | None = msgpack.packb(record, default=repr, unicode_errors="backslashreplace")
        except (ValueError, TypeError, OverflowError, RecursionError):
            packed = None
        with self._lock:
            if packed is None or len(packed) > MAX_RECORD_BYTES:
                self.dropped += 1
                return
            self._queue.append(packed)
            self._bytes += len(packed)
            while len(self._queue) > self._limit or self._bytes > MAX_QUEUED_BYTES:
                self._pop()
                self.dropped += 1

    def batch(self, max_bytes: int = MAX_BATCH_BYTES) -> tuple[int, list[bytes]]:
        """The oldest records, and the number of the first; they stay until they are ``taken``."""
        with self._lock:
            chosen: list[bytes] = []
            size = 0
            for one in self._queue:
                size += len(one)
                if size > max_bytes and chosen:
                    break
                chosen.append(one)
            return self._first, chosen

    def taken(self, last: int, *, refused: bool = False) -> None:
        """The records up to number ``last`` are no longer needed; those that were ``refused`` count as dropped.

        What was dropped meanwhile is not dropped twice.
        """
        with self._lock:
            while self._queue and self._first <= last:
                self._pop()
                self.dropped += refused

    def _pop(self) -> None:
        self._bytes -= len(self._queue.popleft())
        self._first += 1


class Sender:
    """Sends what is ``record``-ed while ``run`` runs.

    ``source``: ``worker``, ``lighthouse`` or ``relay``. ``name``: replica_id, or name of the service. ``address``: of
    the metrics service as it is known now; None: of none. ``interval``: seconds between batches.
    """

    def __init__(
        self,
        source: str,
        name: str,
        address: Callable[[], str | None],
        identity: Identity,
        *,
        job: str = "",
        interval: float = 1.0,
    ) -> None:
        self._head = {"source": source, "name": name, "job": job, "boot": uuid.uuid4().hex}
        self._address = address
        self._identity = identity
        self._interval = interval
        self._outbox = Outbox()
        self._logged = float("-inf")

    @property
    def dropped(self) -> int:
        return self._outbox.dropped

    def record(self, kind: str, **what: Any) -> None:
        """Any thread; never blocks, never raises for want of a service. ``t`` is now unless it is given."""
        self._outbox.add({"t": time.time(), "kind": kind, **what})

    async def run(self) -> None:
        """Until cancelled."""
        pause = FIRST_PAUSE
        while True:
            address = self._address() if len(self._outbox) else None
            if address is None:
                await asyncio.sleep(self._interval)
                continue
            try:
                async with self._identity.session(timeout=REQUEST_SECONDS, place=place_of("metrics", address)) as http:
                    while self._address() == address:
                        pause = FIRST_PAUSE if await self._send(http, address) else pause
                        await asyncio.sleep(self._interval)
            except (aiohttp.ClientError, KeepstepError, TimeoutError, OSError) as error:
                self._failed(address, error)
                await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - spreads senders
                pause = min(2 * pause, LONGEST_PAUSE)

    async def flush(self, seconds: float) -> None:
        """Sends what waits, for the last time. Never raises."""
        address = self._address() if len(self._outbox) else None
        if address is None:
            return
        try:
            place = place_of("metrics", address)
            async with asyncio.timeout(seconds), self._identity.session(timeout=seconds, place=place) as http:
                while await self._send(http, address):
                    pass
        except (aiohttp.ClientError, KeepstepError, TimeoutError, OSError) as error:
            self._failed(address, error)

    async def _send(self, http: aiohttp.ClientSession, address: str) -> bool:
        """Whether there was something to send."""
        first, records = self._outbox.batch()
        if not records:
            return False
        last = first + len(records) - 1
        body = pack_batch({**self._head, "first": first, "dropped": self._outbox.dropped}, records)
        async with http.post(
            f"{address}{PATH}", data=body, headers={"Content-Type": "application/msgpack"}, allow_redirects=False
        ) as answer:
            if answer.status in NEVER_TAKEN:
                self._outbox.taken(last, refused=True)
            await raise_for_problem(answer)
            if answer.status != HTTPStatus.OK:
                raise Problem(answer.status, "what answers there is no metrics service")
        self._outbox.taken(last)
        return True

    def _failed(self, address: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._logged >= LOG_AGAIN_SECONDS:
            self._logged = now
            older = "; update it first if it is of an older release" if isinstance(error, AuthError) else ""
            log.warning(
                "the metrics service does not take what it is told; trying on",
                reason=explained(error, address) + older,
                waiting=len(self._outbox),
                dropped=self.dropped,
            )


def pack_batch(head: Mapping[str, Any], records: list[bytes]) -> bytes:
    """One msgpack map: ``head``, and ``records`` that are packed already."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(head) + 1)
    for name, value in head.items():
        packer.pack(name)
        packer.pack(value)
    packer.pack("records")
    packer.pack_array_header(len(records))
    whole: bytes = packer.bytes() + b"".join(records)
    return whole
