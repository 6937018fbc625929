"""The key-value tables over which the members of a quorum meet; ``store_client`` is the client half.

A table belongs to one (job, epoch, quorum_id, group_rank). The newest (epoch, quorum_id) that anybody asks for drops
the older tables of that job and ends the waits on them.

Over HTTP every operation is ``POST /v1/rendezvous`` with a msgpack array: job, epoch, quorum_id, group_rank, the name
of the operation, its arguments. The answer is its result in msgpack, or a problem document.
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
from keepstep_mesh.net.http import BODY_SECONDS, Problem
from keepstep_mesh.security.tokens import ClientToken

PATH = "/v1/rendezvous"
MAX_KEY_CHARACTERS = 1024
"""Of a key, and of the name of a job."""
MAX_VALUE_BYTES = 1024 * 1024
MAX_BODY_BYTES = MAX_VALUE_BYTES + 4096
MAX_TOTAL_BYTES = 64 * 1024 * 1024
MAX_TABLES = 4096
IDLE_TABLE_SECONDS = 600.0
"""A table that no member uses for longer is dropped."""
VERSION = 2
"""What this build understands of where members meet and what they store there (``MemberInfo.rendezvous``). 2: another
host for each quorum_id, and short Gloo addresses."""
WAIT_POLL_SECONDS = 5.0
"""How long the server holds a wait over HTTP before it answers "not yet" and is asked again."""

_KEY_OVERHEAD_BYTES = 128


class RendezvousError(KeepstepError):
    """The members did not meet: the host is gone or full, or this quorum is no longer the newest."""


@dataclass(frozen=True, slots=True)
class Table:
    """Names one table of the server."""

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
    """Bytes held."""
    waiting: dict[str, list[tuple[Sequence[str], Arrival]]] = field(default_factory=dict)
    """Waits by one key that each of them lacks."""

    def put(self, key: str, value: bytes) -> list[Arrival]:
        """Stores a value and returns the waits that it completes."""
        self.size += _size(key, value) - self._held(key)
        self.values[key] = value
        return [arrival for keys, arrival in self.waiting.pop(key, ()) if not self.await_keys(keys, arrival)]

    def delete(self, key: str) -> bool:
        self.size -= self._held(key)
        return self.values.pop(key, None) is not None

    def await_keys(self, keys: Sequence[str], arrival: Arrival) -> bool:
        """Whether one of the keys is missing still; then ``arrival`` is kept."""
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
    """The tables of one host, in memory. Every method may be called from any thread; none blocks.

    ``token``: of the job; callers over HTTP must show what is derived from it (``ClientToken``). None asks for nothing.
    """

    def __init__(self, token: str | ClientToken | None = None) -> None:
        self._token = ClientToken.of(token)
        self._lock = threading.Lock()
        self._tables: dict[Table, _Contents] = {}
        self._oldest: dict[str, Table] = {}
        """Of each job: where the quorum begins that is not over."""
        self._closed = False

    def routes(self) -> list[web.RouteDef]:
        """The aiohttp routes to mount."""
        return [web.post(PATH, self._handle)]

    def close(self) -> None:
        """Ends every wait; whatever is asked from now on is refused."""
        with self._lock:
            self._closed = True
            dropped = [self._tables.pop(table) for table in list(self._tables)]
        _fail(dropped, "the rendezvous host is shutting down")

    def drop_before(self, job: str, epoch: int, quorum_id: int) -> None:
        """The group has come to this quorum: tables of older ones are dropped, their waits end, and none is made."""
        newest = Table(job, epoch, quorum_id)
        with self._lock:
            if job not in self._oldest or self._oldest[job].generation < newest.generation:
                self._oldest[job] = newest
            for known in list(self._tables):
                if known.job == job and known.generation < newest.generation:
                    _fail([self._tables.pop(known)], _over(known, newest))

    def set(self, table: Table, key: str, value: bytes) -> None:
        self._update(table, key, lambda _: value)

    def add(self, table: Table, key: str, amount: int) -> int:
        """Adds to a counter, kept as decimal text and 0 at first; returns the new count."""
        return int(self._update(table, key, lambda old: b"%d" % (int(old or b"0") + amount)) or 0)

    def append(self, table: Table, key: str, value: bytes) -> None:
        self._update(table, key, lambda old: (old or b"") + value)

    def compare_set(self, table: Table, key: str, expected: bytes, desired: bytes) -> bytes:
        """Writes if the value is ``expected``, or absent and ``expected`` empty. Returns the value that holds now."""
        value = self._update(table, key, lambda old: desired if (old or b"") == expected else old)
        return expected if value is None else value

    def check(self, table: Table, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        with self._lock:
            return all(key in self._open(table).values for key in keys)

    def delete(self, table: Table, key: str) -> bool:
        with self._lock:
            return self._open(table).delete(key)

    def items(self, table: Table, start: int) -> list[Item]:
        """Keys and values in the order in which they came, from the ``start``-th on."""
        with self._lock:
            return list(itertools.islice(self._open(table).values.items(), start, None))

    def wait(self, table: Table, keys: Sequence[str]) -> Arrival:
        """Completes once all keys are there; ``cancel`` gives it up.

        :raises RendezvousError: in the future too, when a newer quorum takes over or the server closes.
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
                raise RendezvousError(f"rendezvous value {key!r} has {len(value)} bytes; {MAX_VALUE_BYTES} are allowed")
            if sum(held.size for held in self._tables.values()) + _size(key, value) > MAX_TOTAL_BYTES:
                raise RendezvousError(f"the rendezvous host is full: it holds {MAX_TOTAL_BYTES} bytes already")
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
                    _fail([self._tables.pop(known)], f"nobody used this table for {IDLE_TABLE_SECONDS} s")
            if len(self._tables) >= MAX_TABLES:
                raise RendezvousError(f"the rendezvous host is full: it holds {MAX_TABLES} tables already")
            self._tables[table] = _Contents(now)
        contents = self._tables[table]
        contents.used_at = now
        return contents

    async def _handle(self, request: web.Request) -> web.Response:
        if not self._token.accepts_peer(request.headers.get("Authorization", "")):
            return Problem(HTTPStatus.UNAUTHORIZED, "a bearer token of this job is needed").response()
        try:
            result = await self._execute(*_unpack(await _body(request)))
        except ProtocolError as error:
            return Problem(HTTPStatus.BAD_REQUEST, str(error)).response()
        except RendezvousError as error:
            return Problem(HTTPStatus.GONE, str(error)).response()
        return web.Response(body=cast("bytes", msgpack.packb(result)), content_type="application/msgpack")

    async def _execute(self, table: Table, operation: str, arguments: list[Any]) -> object:
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
            raise ProtocolError(f"bad arguments for rendezvous operation {operation!r}: {error}") from error
        raise ProtocolError(f"no rendezvous operation {operation!r} with {len(arguments)} such arguments")


def _check_key(key: str) -> None:
    if len(key) > MAX_KEY_CHARACTERS:
        raise RendezvousError(f"rendezvous key of {len(key)} characters; {MAX_KEY_CHARACTERS} are allowed")


def _over(old: Table, new: Table) -> str:
    return f"quorum {old.quorum_id} of job {old.job!r} is over: its members meet for quorum {new.quorum_id} now"


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
                    raise ProtocolError(f"a rendezvous request has at most {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise ProtocolError(f"the rendezvous request did not come within {BODY_SECONDS:g} s") from None
    return bytes(body)


def _unpack(body: bytes) -> tuple[Table, str, list[Any]]:
    try:
        match msgpack.unpackb(body, use_list=True):
            case [str(job), int(epoch), int(quorum_id), int(group_rank), str(operation), *arguments]:
                if len(job) > MAX_KEY_CHARACTERS:
                    raise ProtocolError(
                        f"the name of a job has {len(job)} characters; {MAX_KEY_CHARACTERS} are allowed"
                    )
                return Table(job, epoch, quorum_id, group_rank), operation, arguments
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a rendezvous request is not msgpack: {error}") from error
    raise ProtocolError("a rendezvous request is [job, epoch, quorum_id, group_rank, operation, arguments...]")
