"""Send records to the metrics service in the background, in batches.

The caller never waits: a record goes into a bounded queue (``Outbox``). While the metrics service is unreachable, the
queue drops its oldest records and counts them. The sender has one batch in flight and retries it until the service
accepts it or refuses it for good. Records are numbered, so the service counts one that arrives twice only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import aiohttp

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import AuthError, KeepstepError
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.net.http import Identity, Problem, raise_for_problem, read_json_answer
from keepstep_mesh.protocol.telemetry_records import BatchHead, Record, Source, pack_batch, pack_record
from keepstep_mesh.security.request_errors import explained
from keepstep_mesh.security.tokens import place_of
from keepstep_mesh.telemetry.clock_offset import ClockOffset
from keepstep_mesh.telemetry.tracing import exporting

PATH = "/v1/ingest"
MAX_QUEUED = 20_000
MAX_QUEUED_BYTES = 16 * 1024 * 1024
MAX_BATCH_BYTES = 512 * 1024
MAX_RECORD_BYTES = 256 * 1024
"""The queue drops a larger record. The largest records are the member lists of quorums."""
REFUSED_FOR_GOOD = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""A retry of such a batch gets the same answer."""
BATCH_SECONDS = 5.0
BACKOFF = Backoff(first=0.5, most=15.0)
"""Before a batch is sent again after a failure."""
WARN_CLOCK_SECONDS = 1.0
"""A larger offset of clocks is logged."""

log = get_logger("keepstep.telemetry")


class Outbox:
    """A bounded queue of packed records. Safe to use from any thread."""

    def __init__(self, limit: int = MAX_QUEUED) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._first = 1
        """Number of the oldest record in the queue."""
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, record: Record) -> None:
        """Append a record. Never raises: a record that cannot be packed counts as dropped."""
        try:
            packed: bytes | None = pack_record(record)
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
        """Return the number of the oldest record and the oldest records. They stay in the queue until ``remove``."""
        with self._lock:
            chosen: list[bytes] = []
            size = 0
            for one in self._queue:
                size += len(one)
                if size > max_bytes and chosen:
                    break
                chosen.append(one)
            return self._first, chosen

    def remove(self, last: int, *, refused: bool = False) -> None:
        """Remove the records up to number ``last``, after the service answered. ``refused``: count them as dropped.

        A record that the queue dropped in the meantime is not counted again.
        """
        with self._lock:
            while self._queue and self._first <= last:
                self._pop()
                self.dropped += refused

    def _pop(self) -> None:
        self._bytes -= len(self._queue.popleft())
        self._first += 1


class Sender:
    """Sends records while ``run`` runs.

    Args:
        source: Kind of the sending process.
        name: replica_id of a worker, name of a service.
        address: Returns the current address of the metrics service; None while none is registered.
        identity: Token and TLS settings for requests to the metrics service.
        job: Job of a worker; empty for a service.
        interval: Seconds between batches.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        address: Callable[[], str | None],
        identity: Identity,
        *,
        job: str = "",
        interval: float = 1.0,
    ) -> None:
        self._head = BatchHead(source=source, name=name, job=job, boot=uuid.uuid4().hex, first=1)
        self._address = address
        self._identity = identity
        self._interval = interval
        self._outbox = Outbox()
        self._failures_logged = LogLimiter()
        self._clocks_logged = LogLimiter(seconds=3600.0)
        self.clock_offset = ClockOffset()
        """Clock of the metrics service minus that of this machine."""

    @property
    def dropped(self) -> int:
        return self._outbox.dropped

    def record(self, record: Record) -> None:
        """Queue a record. Safe to call from any thread; never blocks and never raises."""
        self._outbox.add(record)
        if exporting.of_service is not None:
            exporting.export_record(exporting.of_service, record)

    async def run(self) -> None:
        """Send the queued records, until cancelled."""
        failures = 0
        while True:
            address = self._address() if len(self._outbox) else None
            if address is None:
                await asyncio.sleep(self._interval)
                continue
            try:
                place = place_of("metrics", address)
                async with self._identity.session(timeout=BATCH_SECONDS, place=place, kind="metrics") as http:
                    while self._address() == address:
                        failures = 0 if await self._send(http, address) else failures
                        await asyncio.sleep(self._interval)
            except (aiohttp.ClientError, KeepstepError, TimeoutError, OSError) as error:
                self._failed(address, error)
                failures += 1
                await asyncio.sleep(BACKOFF.seconds(failures, random.random()))  # noqa: S311 - spreads senders

    async def flush(self, seconds: float) -> None:
        """Send all queued records, within ``seconds``. Never raises."""
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
        """Send one batch. Return False if the queue is empty."""
        first, records = self._outbox.batch()
        if not records:
            return False
        last = first + len(records) - 1
        offset = self.clock_offset.seconds
        head = replace(self._head, first=first, dropped=self._outbox.dropped, clock_offset=offset)
        body, sent = pack_batch(head, records), time.time()
        async with http.post(
            f"{address}{PATH}", data=body, headers={"Content-Type": "application/msgpack"}, allow_redirects=False
        ) as answer:
            if answer.status in REFUSED_FOR_GOOD:
                self._outbox.remove(last, refused=True)
            await raise_for_problem(answer)
            if answer.status != HTTPStatus.OK:
                raise Problem(answer.status, "unexpected answer: is this the address of a metrics service?")
            self._outbox.remove(last)
            with contextlib.suppress(KeepstepError):  # the answer has no times, but the records are stored
                self._compare_clocks(sent, await read_json_answer(answer), time.time())
        return True

    def _compare_clocks(self, sent: float, taken: Mapping[str, Any], arrived: float) -> None:
        """Measure the offset, and warn about a large one. An older metrics service does not tell its time."""
        received, answered = taken.get("received"), taken.get("answered")
        if not isinstance(received, float) or not isinstance(answered, float):
            return
        self.clock_offset.add(sent, received, answered, arrived)
        offset = self.clock_offset.seconds
        if abs(offset) > WARN_CLOCK_SECONDS and self._clocks_logged.allows(time.monotonic()):
            log.warning(
                "this machine's clock differs from that of the metrics service, which corrects its times; run NTP",
                seconds_behind=round(offset, 3),
            )

    def _failed(self, address: str, error: Exception) -> None:
        if self._failures_logged.allows(time.monotonic()):
            older = "; if it runs an older release, update it first" if isinstance(error, AuthError) else ""
            log.warning(
                "could not send records to the metrics service; retrying",
                reason=explained(error, address) + older,
                queued=len(self._outbox),
                dropped=self.dropped,
            )
