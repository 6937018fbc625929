"""Server of the key-value tables that the members of a quorum use to connect; ``store_client`` is the client.

A table belongs to one (job, epoch, quorum_id, group_rank). A request with a newer (epoch, quorum_id) drops the older
tables of that job and ends the waits on them.

Over HTTP every operation is ``POST /v1/rendezvous`` with a msgpack array: job, epoch, quorum_id, group_rank, the name
of the operation, its arguments. The answer is the result in msgpack, or a problem document.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import msgpack
from aiohttp import web

from keepstep_mesh.errors import KeepstepError, ProtocolError
from keepstep_mesh.net.http import Problem
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.serving.application import BODY_SECONDS

PATH = "/v1/rendezvous"
MAX_KEY_CHARACTERS = 1024
"""Limit of a key, and of the name of a job."""
MAX_VALUE_BYTES = 1024 * 1024
MAX_BODY_BYTES = MAX_VALUE_BYTES + 4096
MAX_TOTAL_BYTES = 64 * 1024 * 1024
MAX_TABLES = 4096
IDLE_TABLE_SECONDS = 600.0
"""Time without use after which a table is dropped."""
VERSION = 3
"""Version of the rendezvous that this build supports (``MemberInfo.rendezvous``). 2: another host for each quorum_id,
and short Gloo addresses. 3: a barrier of Gloo once all are connected."""
WAIT_POLL_SECONDS = 5.0
"""Limit of a wait over HTTP, after which the server answers "not yet" and the client repeats the request."""

_KEY_OVERHEAD_BYTES = 128


class RendezvousError(KeepstepError):
    """The rendezvous failed: its host disconnected or is full, or a newer quorum has replaced this one."""


@dataclass(frozen=True, slots=True)
class Table:
    """The name of one table."""

    job: str = "default"
    epoch: int = 0
    quorum_id: int = 0
    group_rank: int = 0

    @property
    def generation(self) -> tuple[int, int]:
        return (self.epoch, self.quorum_id)


Arrival = concurrent.futures.Future[None]
Item = tuple[str, bytes]


@dataclass(slots=True)
class _Contents:
    used_at: float
    values: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    """Bytes of all keys and values, with their overhead."""
    waiting: dict[str, list[tuple[Sequence[str], Arrival]]] = field(default_factory=dict)
    """Waits, each under one of its missing keys."""

    def put(self, key: str, value: bytes) -> list[Arrival]:
        """Store a value and return the waits that it completes."""
        self.size += _size(key, value) - self._held(key)
        self.values[key] = value
        return [arrival for keys, arrival in self.waiting.pop(key, ()) if not self.await_keys(keys, arrival)]

    def delete(self, key: str) -> bool:
        self.size -= self._held(key)
        return self.values.pop(key, None) is not None

    def await_keys(self, keys: Sequence[str], arrival: Arrival) -> bool:
        """Return whether a key is missing. If so, store ``arrival`` under that key."""
        for key in keys:
            if key not in self.values:
                queue = self.waiting.setdefault(key, [])
                queue[:] = [waiting for waiting in queue if not waiting[1].done()]
                queue.append((keys, arrival))
                return True
        return False

    def _held(self, key: str) -> int:
        return _size(key, self.values[key]) if key in self.values else 0


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + _KEY_OVERHEAD_BYTES


class KeyValueServer:
    """The tables of one host, in memory. Call every method from any thread; none blocks.

    All methods raise ``RendezvousError`` for a table of an older quorum, for a key or value over its limit, when the
    host is full, and after ``close``.

    Args:
        token: token of the job. Callers over HTTP must send the token derived from it (``ClientToken``). None: accept
            callers without a token.
        max_bytes: limit of all tables together; None: ``MAX_TOTAL_BYTES``.
    """

    def __init__(self, token: str | ClientToken | None = None, *, max_bytes: int | None = None) -> None:
        self._token = ClientToken.of(token)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tables: dict[Table, _Contents] = {}
        self._oldest: dict[str, Table] = {}
        """Table of the oldest quorum of each job that is still accepted."""
        self._closed = False

    def routes(self) -> list[web.RouteDef]:
        """Return the aiohttp routes of this server."""
        return [web.post(PATH, self._handle)]

    def close(self) -> None:
        """End every wait, and refuse all later calls."""
        with self._lock:
            self._closed = True
            dropped = [self._tables.pop(table) for table in list(self._tables)]
        _fail(dropped, "the rendezvous host is shutting down")

    def drop_before(self, job: str, epoch: int, quorum_id: int) -> None:
        """Drop the tables of quorums older than this one, end their waits, and refuse later requests for them."""
        newest = Table(job, epoch, quorum_id)
        with self._lock:
            if job not in self._oldest or self._oldest[job].generation < newest.generation:
                self._oldest[job] = newest
            for known in list(self._tables):
                if known.job == job and known.generation < newest.generation:
                    _fail([self._tables.pop(known)], _over(known, newest))

    def set(self, table: Table, key: str, value: bytes) -> None:
        """Set a key to a value of at most ``MAX_VALUE_BYTES``."""
        self._update(table, key, lambda _: value)

    def add(self, table: Table, key: str, amount: int) -> int:
        """Add to a counter, stored as decimal text and initially 0. Return the new count."""
        return int(self._update(table, key, lambda old: b"%d" % (int(old or b"0") + amount)) or 0)

    def append(self, table: Table, key: str, value: bytes) -> None:
        """Append to a value, which is empty while its key is not set."""
        self._update(table, key, lambda old: (old or b"") + value)

    def compare_set(self, table: Table, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the value equals ``expected``; a missing key equals the empty value.

        Returns:
            The value after the call.
        """
        value = self._update(table, key, lambda old: desired if (old or b"") == expected else old)
        return expected if value is None else value

    def check(self, table: Table, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        with self._lock:
            return all(key in self._open(table).values for key in keys)

    def delete(self, table: Table, key: str) -> bool:
        """Delete a key, and return whether it was set."""
        with self._lock:
            return self._open(table).delete(key)

    def items(self, table: Table, start: int) -> list[Item]:
        """Return keys and values in the order in which they were set, from index ``start``."""
        with self._lock:
            return list(itertools.islice(self._open(table).values.items(), start, None))

    def wait(self, table: Table, keys: Sequence[str]) -> Arrival:
        """Return a future that completes when all keys are set. Cancelling it ends the wait.

        Raises:
            RendezvousError: a newer quorum replaced this one, or the server closed; the future raises it too.
        """
        arrival: Arrival = concurrent.futures.Future()
        for key in keys:
            _check_key(key)
        with self._lock:
            missing = self._open(table).await_keys(keys, arrival)
        if not missing:
            arrival.set_result(None)
        return arrival

    def _update(self, table: Table, key: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        _check_key(key)
        with self._lock:
            contents = self._open(table)
            old = contents.values.get(key)
            value = change(old)
            if value is None or value == old:
                return value
            if len(value) > MAX_VALUE_BYTES:
                raise RendezvousError(
                    f"rendezvous value {key!r} too large: {len(value)} bytes (limit {MAX_VALUE_BYTES})"
                )
            limit = self._max_bytes or MAX_TOTAL_BYTES
            if sum(held.size for held in self._tables.values()) + _size(key, value) > limit:
                raise RendezvousError(f"the rendezvous host is full: it stores up to {limit} bytes")
            complete = contents.put(key, value)
        for arrival in complete:
            if arrival.set_running_or_notify_cancel():
                arrival.set_result(None)
        return value

    def _open(self, table: Table) -> _Contents:
        if self._closed:
            raise RendezvousError("the rendezvous host is shutting down")
        now = time.monotonic()
        oldest = self._oldest.get(table.job)
        if oldest is not None and table.generation < oldest.generation:
            raise RendezvousError(_over(table, oldest))
        if table not in self._tables:
            for known in list(self._tables):
                if known.job == table.job and known.generation > table.generation:
                    raise RendezvousError(_over(table, known))
                if known.job == table.job and known.generation < table.generation:
                    _fail([self._tables.pop(known)], _over(known, table))
                elif now - self._tables[known].used_at > IDLE_TABLE_SECONDS:
                    _fail([self._tables.pop(known)], f"rendezvous table dropped: unused for {IDLE_TABLE_SECONDS:g} s")
            if len(self._tables) >= MAX_TABLES:
                raise RendezvousError(f"the rendezvous host is full: it stores up to {MAX_TABLES} tables")
            self._tables[table] = _Contents(now)
        contents = self._tables[table]
        contents.used_at = now
        return contents

    async def _handle(self, request: web.Request) -> web.Response:
        if not self._token.accepts_peer(request.headers.get("Authorization", "")):
            return Problem(HTTPStatus.UNAUTHORIZED, "unauthorized: send a bearer token of this job").response()
        return await handle(request, lambda _: self)

    async def execute(self, table: Table, operation: str, arguments: list[Any]) -> object:
        """Run one operation of a request.

        Raises:
            ProtocolError: the operation is unknown, or its arguments are invalid.
            RendezvousError: see the class.
        """
        try:
            match operation, arguments:
                case "wait", [list(keys), int(start), float(seconds)] if start >= 0 and seconds >= 0:
                    arrived = asyncio.wrap_future(self.wait(table, keys))
                    await asyncio.wait([arrived], timeout=min(seconds, WAIT_POLL_SECONDS))
                    if not arrived.done():
                        arrived.cancel()
                        return None
                    arrived.result()
                    return self.items(table, start)
                case "set", [str(key), bytes(value)]:
                    self.set(table, key, value)
                    return None
                case "add", [str(key), int(amount)]:
                    return self.add(table, key, amount)
                case "append", [str(key), bytes(value)]:
                    self.append(table, key, value)
                    return None
                case "compare_set", [str(key), bytes(expected), bytes(desired)]:
                    return self.compare_set(table, key, expected, desired)
                case "check", [list(keys)]:
                    return self.check(table, keys)
                case "delete", [str(key)]:
                    return self.delete(table, key)
                case "items", [int(start)] if start >= 0:
                    return self.items(table, start)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"invalid arguments of rendezvous operation {operation!r}: {error}") from error
        raise ProtocolError(
            f"unknown rendezvous operation {operation!r} with {len(arguments)} arguments of these types"
        )


async def handle(request: web.Request, server_of: Callable[[Table], KeyValueServer]) -> web.Response:
    """Answer a request at ``PATH``.

    Args:
        request: of any peer.
        server_of: returns the server of a table, or raises RendezvousError.
    """
    try:
        table, operation, arguments = _unpack(await _body(request))
        result = await server_of(table).execute(table, operation, arguments)
    except ProtocolError as error:
        return Problem(HTTPStatus.BAD_REQUEST, str(error)).response()
    except RendezvousError as error:
        return Problem(HTTPStatus.GONE, str(error)).response()
    return web.Response(body=cast("bytes", msgpack.packb(result)), content_type="application/msgpack")


def _check_key(key: str) -> None:
    if len(key) > MAX_KEY_CHARACTERS:
        raise RendezvousError(f"rendezvous key too long: {len(key)} characters (limit {MAX_KEY_CHARACTERS})")


def _over(old: Table, new: Table) -> str:
    return f"quorum {old.quorum_id} of job {old.job!r} is over: quorum {new.quorum_id} has replaced it"


def _fail(dropped: list[_Contents], reason: str) -> None:
    for contents in dropped:
        for _, arrival in itertools.chain.from_iterable(contents.waiting.values()):
            if arrival.set_running_or_notify_cancel():
                arrival.set_exception(RendezvousError(reason))


async def _body(request: web.Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ProtocolError(f"rendezvous request too large (limit {MAX_BODY_BYTES} bytes)")
    except TimeoutError:
        raise ProtocolError(f"rendezvous request not received within {BODY_SECONDS:g} s") from None
    return bytes(body)


def _unpack(body: bytes) -> tuple[Table, str, list[Any]]:
    try:
        match msgpack.unpackb(body, use_list=True):
            case [str(job), int(epoch), int(quorum_id), int(group_rank), str(operation), *arguments]:
                if len(job) > MAX_KEY_CHARACTERS:
                    raise ProtocolError(f"job name too long: {len(job)} characters (limit {MAX_KEY_CHARACTERS})")
                return Table(job, epoch, quorum_id, group_rank), operation, arguments
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"invalid rendezvous request: not msgpack: {error}") from error
    raise ProtocolError(
        "invalid rendezvous request: expected [job, epoch, quorum_id, group_rank, operation, arguments...]"
    )
