"""The serving half of ``HTTPTransport``: one thread, one asyncio loop, raw sockets.

Raw, because what an asyncio transport cannot send at once it copies; ``sock_sendall`` sends from the snapshot itself.
One thread was faster than a thread for each reader (4.7 against 2.8 GB/s on one stream over loopback: smaller pieces
stay in the cache), and a slow reader costs nothing but its own socket.

    GET /checkpoint/<step>?wait=<seconds>   the manifest of that step, and a lease on its bytes (header Keepstep-Lease)
    GET /content/<step>?wait=<seconds>      the same without the digests, before the bytes are hashed
    GET /manifest/<lease>                   the manifest, as soon as they are
    GET /lease/<lease>                      bytes of the pack; Range: bytes=<first>-<last>. Keepstep-Queue: <seconds>
                                            asks for a word (status 102) that often while the request waits for its turn
    DELETE /lease/<lease>                   the reader is done
    GET /holders/<lease>                    which other readers of the same snapshot serve chunks of it; see ``holders``
    GET /chunk/<digest>                     a chunk that this process, which heals, has already

Errors have a msgpack body {"reason": sentence}: 400, 401, 403 and 421 (a web page), 404 (not staged in time), 410 (no
longer there), 416, 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import msgpack

from keepstep.checkpointing.direct import holders
from keepstep.checkpointing.direct.admission import Admission
from keepstep.checkpointing.direct.connection import QUEUE_FIELD
from keepstep.checkpointing.direct.peer_choice import PEERS_AT_ONCE
from keepstep.checkpointing.direct.rate_limiter import RateLimiter
from keepstep.checkpointing.errors import UnsupportedValue
from keepstep.checkpointing.state.staging import Snapshot
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.fork_safety import open_socket
from keepstep_mesh.protocol.manifest import DIGEST_BYTES
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.security.web_pages import HOST_ADVICE, host_problem, origin_problem

MAX_CONNECTIONS = 256
MAX_HEAD_BYTES = 8192
HEAD_TIMEOUT_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.1
SHORT_BYTES = 64 << 10
"""Parts that are shorter are sent together."""
PIECE_BYTES = 1 << 20
"""Sent at a time at most: that a reader has taken one is what is seen of its progress."""
SMALL_BYTES = 64 << 10
"""Sent at a time to a slow reader, and where the uplink has a budget."""
MIN_NEWS_SECONDS = 0.05
QUEUE_LOOK_SECONDS = 0.5
"""Between two looks whether those that have a turn have become slow."""
SHUTDOWN_TIMEOUT_SECONDS = 10.0
TURN_SECONDS = 0.15
"""A chunk that is lent has the uplink to itself for so long at most."""

_REQUEST_LINE = re.compile(
    r"(GET|DELETE) /(checkpoint|content|manifest|lease|holders|chunk)/([0-9a-zA-Z_-]{1,64})"
    r"(?:\?wait=(\d{1,9}(?:\.\d{1,9})?))? HTTP/1\.1"
)
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_SECONDS = re.compile(r"\d{1,3}\.\d{3}")
GONE = "this lease has ended: its reader was too slow, or newer steps needed the memory"

log = get_logger("keepstep.checkpointing")


class _Refused(Exception):  # an answer, not an error of ours
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(eq=False)
class _Lease:
    """One reader's right to a snapshot. Ends when the reader says so, or got nothing for as long as the timeout."""

    name: str
    snapshot: Snapshot
    expires: float
    serves: tuple[str, str, bytes] | None = None
    """Its name, the address where it serves chunks to other readers, and which of them."""
    timer: asyncio.TimerHandle | None = None
    senders: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(frozen=True)
class _Request:
    method: str
    kind: str
    name: str
    wait: float
    fields: Mapping[str, str]
    """Header fields, in lower case."""


class CheckpointServer:
    """Serves one snapshot at a time, on a thread of its own. The public methods may be called from any thread.

    Args:
        timeout: longest wait of a reader for a step, and for a reader to take ``PIECE_BYTES``; seconds.
        budget: what all readers together may take of the uplink; None: everything.
    """

    def __init__(self, host: str, timeout: float, token: ClientToken, budget: RateLimiter | None = None) -> None:
        self._timeout = timeout
        self._token = token
        self._host = host
        self._budget = budget if budget is not None and budget.limited else None
        self._admission = Admission()
        self._turn_ended = asyncio.Event()
        self._listener = listen(host)
        self._address, self.port = self._listener.getsockname()[:2]
        self._to_serve: Snapshot | None = None
        self._refusing = False
        self._served: Snapshot | None = None
        """What ``_to_serve`` becomes once the server's thread has heard of it."""
        self._newest_step = -1
        self._refused: tuple[int, str] | None = None
        """A step of which there is no snapshot, and why."""
        self.served_at = 0.0
        """When a part of a chunk that was lent was last sent; monotonic time."""
        self._lent: Callable[[bytes], list[memoryview] | None] | None = None
        self._turns = asyncio.Semaphore(PEERS_AT_ONCE)
        self._changed = asyncio.Event()
        self._leases: dict[str, _Lease] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-checkpoint-server", daemon=True)
        self._thread.start()

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self._address).is_loopback

    def serve(self, snapshot: Snapshot | None) -> None:
        """From now on new readers get ``snapshot`` (None: they wait). Readers of the one before go on."""
        if snapshot is not None or self._to_serve is not None or self._refusing:  # each step ends with None
            self._to_serve, self._refusing = snapshot, False
            self._call(self._set_served, snapshot)

    def refuse(self, step: int, reason: str) -> None:
        """Who asks for ``step``, or waits for it, is told that there is none, until ``serve`` is called again."""
        self._refusing = True
        self._call(self._set_refused, step, reason)

    def lend(self, chunks: Callable[[bytes], list[memoryview] | None] | None) -> None:
        """Serves the memory that ``chunks`` gives for the digest of a chunk; None: no more.

        That memory may change once it is taken back: what is on its way then has a wrong digest.
        """
        self._lent = chunks

    def cut_off(self, snapshot: Snapshot) -> None:
        """Ends the transfers of all readers of ``snapshot``. Does not wait for that."""
        self._call(self._end_leases, snapshot)

    def stop(self, wait: bool) -> None:
        """Closes the port and every connection. ``wait``: returns when the thread has ended."""
        self._call(self._stopping.set)
        if wait:
            self._thread.join(SHUTDOWN_TIMEOUT_SECONDS)
            if self._thread.is_alive():
                log.error("the checkpoint server does not end", port=self.port, seconds=SHUTDOWN_TIMEOUT_SECONDS)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the checkpoint server has ended already", port=self.port)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
        log.debug("checkpoint server stopped", port=self.port)

    async def _serve(self) -> None:
        self._loop.add_reader(self._listener, self._accept)  # sock_accept loses a connection when it is cancelled
        try:
            await self._stopping.wait()
        finally:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._end_leases(None)
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("cannot accept connections for a moment", port=self.port, reason=str(error))
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._accept_again)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("too many connections to the checkpoint server", peer=peer[0], limit=MAX_CONNECTIONS)
            connection.close()
            return
        task = self._loop.create_task(self._converse(connection, peer[0]))
        self._connections.add(task)
        task.add_done_callback(partial(self._forget, connection))

    def _accept_again(self) -> None:
        if not self._stopping.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the checkpoint server failed a reader", exc_info=error)

    async def _converse(self, connection: socket.socket, peer: str) -> None:
        """All requests of one connection, one after the other."""
        received = bytearray()
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    if (head := await self._head(connection, received)) is None:
                        return
                    await self._answer(connection, self._parse(head))
                except _Refused as refused:
                    body = msgpack.packb({"reason": refused.reason})
                    await self._send_head(connection, refused.status, len(body), body=body)
                    if refused.status == HTTPStatus.BAD_REQUEST:
                        log.warning("bad request to the checkpoint server", peer=peer, reason=refused.reason)
                        return
        except OSError as error:
            log.info("reader of a checkpoint is gone", peer=peer, reason=str(error) or "it was silent for too long")

    async def _head(self, connection: socket.socket, received: bytearray) -> bytes | None:
        """The next request up to its empty line, out of ``received`` and the socket; None when the reader is done."""
        async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
            while (end := received.find(b"\r\n\r\n")) < 0:
                if len(received) > MAX_HEAD_BYTES:
                    raise _Refused(400, f"a request has at most {MAX_HEAD_BYTES} bytes here")
                data = await self._loop.sock_recv(connection, MAX_HEAD_BYTES)
                if not data:
                    return None
                received += data
        head = bytes(received[:end])
        del received[: end + 4]
        return head

    def _parse(self, head: bytes) -> _Request:
        first, *lines = head.decode("latin-1").split("\r\n")
        matched = _REQUEST_LINE.fullmatch(first)
        if matched is None:
            raise _Refused(
                400, f"this server has /checkpoint/<step>, /lease/<name> and /chunk/<digest>, not {first[:80]!r}"
            )
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if not self._token:
            own = (self._host,)
            wrong = host_problem(fields.get("host"), own, HOST_ADVICE) if self.is_loopback else None
            if wrong is not None:
                raise _Refused(421, wrong)
            if (wrong := origin_problem(fields.get("origin"), own)) is not None:
                raise _Refused(403, wrong)
        if not self._token.accepts_peer(fields.get("authorization", "")):
            raise _Refused(401, "the bearer token is missing or wrong")
        if fields.get("content-length", "0") != "0" or "transfer-encoding" in fields:
            raise _Refused(400, "a request has no body here")
        method, kind, name, wait = matched.groups()
        return _Request(method, kind, name, float(wait or 0), fields)

    async def _answer(self, connection: socket.socket, request: _Request) -> None:
        if request.kind == "checkpoint" and request.method == "GET" and request.name.isdecimal():
            name = await self._lend_step(int(request.name), request.wait)
            await self._send_manifest(connection, name)
        elif request.kind == "content" and request.method == "GET" and request.name.isdecimal():
            name = await self._lend_step(int(request.name), request.wait)
            content = self._leases[name].snapshot.content_bytes
            await self._send_head(connection, 200, len(content), f"Keepstep-Lease: {name}", content)
        elif request.kind == "manifest" and request.method == "GET":
            await self._send_manifest(connection, request.name)
        elif request.kind == "chunk" and request.method == "GET":
            await self._send_lent(connection, request.name)
        elif request.kind == "lease" and request.method == "GET":
            await self._send_range(connection, self._lease(request.name), request.fields)
        elif request.kind == "holders" and request.method == "GET":
            await self._send_holders(connection, self._lease(request.name), request.fields)
        elif request.kind == "lease":
            self._lease(request.name)
            self._end_lease(request.name)
            await self._send_head(connection, 204, 0)
        else:
            raise _Refused(
                400, f"a checkpoint is fetched with GET /checkpoint/<step>, not {request.method} {request.name}"
            )

    async def _lend_step(self, step: int, wait: float) -> str:
        """The name of a new lease on the snapshot of ``step``, as soon as it is served."""
        snapshot = await self._snapshot_of(step, min(wait, self._timeout))
        name = secrets.token_urlsafe(16)
        self._leases[name] = lease = _Lease(name, snapshot, self._loop.time() + self._timeout)
        self._admission.enter(name)
        self._watch(name, lease)
        return name

    async def _send_manifest(self, connection: socket.socket, name: str) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                manifest = await asyncio.shield(asyncio.wrap_future(self._lease(name).snapshot.manifest))
            await self._send_head(connection, 200, len(manifest), f"Keepstep-Lease: {name}", manifest)
        except UnsupportedValue as error:
            self._end_lease(name)
            raise _Refused(503, str(error)) from error
        except BaseException:
            self._end_lease(name)
            raise

    async def _snapshot_of(self, step: int, wait: float) -> Snapshot:
        """The snapshot of ``step``, held, as soon as it is served."""
        deadline = self._loop.time() + wait
        while True:
            served = self._served
            if served is not None and served.step == step and served.hold():
                return served
            if self._refused is not None and self._refused[0] == step:
                raise _Refused(503, f"the source has no snapshot of step {step}: {self._refused[1]}")
            if self._newest_step > step:
                raise _Refused(410, f"step {step} is gone: step {self._newest_step} was staged since")
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                newest = f"the newest is {self._newest_step}" if self._newest_step >= 0 else "none has been"
                raise _Refused(404, f"step {step} was not staged within {wait:.1f} s; {newest}") from None

    async def _send_range(self, connection: socket.socket, lease: _Lease, fields: Mapping[str, str]) -> None:
        snapshot, asked = lease.snapshot, fields.get("range")
        matched = _RANGE.fullmatch(asked or "")
        first, last = (int(matched[1]), int(matched[2])) if matched else (0, -1)
        if not first <= last < len(snapshot.pack):
            raise _Refused(416, f"ask for bytes=<first>-<last> within the {len(snapshot.pack)} bytes, not {asked!r}")
        if not snapshot.hold():
            raise _Refused(410, GONE)
        task = asyncio.current_task()
        assert task is not None
        lease.senders.add(task)
        try:
            async with self._its_turn(connection, lease, _news_seconds(fields.get(QUEUE_FIELD.lower(), ""))):
                await self._send_head(
                    connection, 206, last + 1 - first, f"Content-Range: bytes {first}-{last}/{len(snapshot.pack)}"
                )

                def took(now: float) -> None:
                    lease.expires = now + self._timeout
                    self._admission.record_progress(lease.name, now)

                await self._send_in_pieces(connection, snapshot.pack[first : last + 1], took)
        finally:
            lease.senders.discard(task)
            snapshot.release()

    @contextlib.asynccontextmanager
    async def _its_turn(self, connection: socket.socket, lease: _Lease, news: float | None) -> AsyncIterator[None]:
        """When ``lease`` may be sent bytes; until then its reader hears every ``news`` seconds that it waits."""
        self._admission.wait(lease.name)
        told = self._loop.time()
        try:
            while not self._admission.begin(lease.name, now := self._loop.time()):
                lease.expires = now + self._timeout  # to wait here is not to be slow
                if news is not None and now - told >= news:
                    told = now
                    await self._send_word(connection, self._admission.ahead(lease.name))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(QUEUE_LOOK_SECONDS if news is None else min(news, QUEUE_LOOK_SECONDS)):
                        await self._turn_ended.wait()
        except BaseException:
            self._admission.give_up(lease.name)
            self._wake_queue()
            raise
        try:
            yield
        finally:
            self._admission.end(lease.name)
            self._wake_queue()

    def _wake_queue(self) -> None:
        self._turn_ended.set()
        self._turn_ended = asyncio.Event()

    async def _send_word(self, connection: socket.socket, ahead: int) -> None:
        async with asyncio.timeout(self._timeout):
            await self._loop.sock_sendall(
                connection, f"HTTP/1.1 102 Processing\r\n{QUEUE_FIELD}: {ahead}\r\n\r\n".encode()
            )

    async def _send_in_pieces(
        self, connection: socket.socket, data: bytes | memoryview, took: Callable[[float], None]
    ) -> None:
        """``took`` is called after each, with the time. They become small where the reader is slow."""
        start, size, now = 0, PIECE_BYTES // 4, self._loop.time()
        while start < len(data):
            async with asyncio.timeout(self._timeout):
                await self._send(connection, data[start : start + size])
            start, began, now = start + size, now, self._loop.time()
            quick = now - began < self._timeout / 16
            size = min(2 * size, PIECE_BYTES) if quick else max(size // 2, SMALL_BYTES)
            took(now)

    async def _send(self, connection: socket.socket, data: bytes | memoryview) -> None:
        """As fast as the budget allows."""
        if self._budget is None:
            await self._loop.sock_sendall(connection, data)
            return
        for start in range(0, len(data), SMALL_BYTES):
            piece = data[start : start + SMALL_BYTES]
            if delay := self._budget.delay(len(piece), time.monotonic()):
                await asyncio.sleep(delay)
            await self._loop.sock_sendall(connection, piece)

    async def _send_holders(self, connection: socket.socket, lease: _Lease, fields: Mapping[str, str]) -> None:
        try:
            lease.serves = holders.read_joiner_fields(fields)
        except ValueError as error:
            raise _Refused(400, str(error)) from error
        lease.expires = self._loop.time() + self._timeout
        others = [
            other.serves
            for other in self._leases.values()
            if other is not lease and other.snapshot is lease.snapshot and other.serves is not None
        ]
        body = holders.pack_holders(others)
        await self._send_head(connection, 200, len(body), body=body)

    async def _send_lent(self, connection: socket.socket, name: str) -> None:
        digest = bytes.fromhex(name) if _DIGEST.fullmatch(name) else b""
        lent = self._lent  # which may be taken back meanwhile
        parts = lent(digest) if lent is not None else None
        if parts is None:
            raise _Refused(404, "this chunk is not here")
        if self._turns.locked():
            raise _Refused(503, "others are being served; ask another joiner, or again")
        async with self._turn():
            await self._send_head(connection, 200, sum(part.nbytes for part in parts))
            for part in gathered(parts):
                await self._send_in_pieces(connection, part, self._lent_some)

    def _lent_some(self, _now: float) -> None:
        self.served_at = time.monotonic()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Few readers at a time: the first passes on all of its chunk while the last would have an eighth."""
        await self._turns.acquire()
        end = self._loop.call_later(TURN_SECONDS, self._turns.release)
        try:
            yield
        finally:
            if self._loop.time() < end.when():
                end.cancel()
                self._turns.release()

    async def _send_head(
        self, connection: socket.socket, status: int, length: int, line: str = "", body: bytes = b""
    ) -> None:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Server: keepstep", f"Content-Length: {length}"]
        lines += [line] if line else []
        async with asyncio.timeout(self._timeout):
            await self._loop.sock_sendall(connection, "\r\n".join([*lines, "", ""]).encode() + body)

    def _lease(self, name: str) -> _Lease:
        lease = self._leases.get(name)
        if lease is None:
            raise _Refused(410, GONE)
        return lease

    def _watch(self, name: str, lease: _Lease) -> None:
        if self._loop.time() >= lease.expires:
            log.warning("cut off a reader that took nothing in time", step=lease.snapshot.step, seconds=self._timeout)
            self._end_lease(name)
        else:
            lease.timer = self._loop.call_at(lease.expires, self._watch, name, lease)

    def _end_lease(self, name: str) -> None:
        lease = self._leases.pop(name, None)
        if lease is None:
            return
        if lease.timer is not None:
            lease.timer.cancel()
        for task in lease.senders:
            task.cancel()
        self._admission.leave(name)
        self._wake_queue()
        lease.snapshot.release()

    def _end_leases(self, snapshot: Snapshot | None) -> None:
        for name, lease in list(self._leases.items()):
            if snapshot is None or lease.snapshot is snapshot:
                self._end_lease(name)

    def _set_served(self, snapshot: Snapshot | None) -> None:
        self._served, self._refused = snapshot, None
        self._newest_step = -1 if snapshot is None else snapshot.step  # steps of a job may go back
        self._wake_readers()

    def _set_refused(self, step: int, reason: str) -> None:
        self._refused = (step, reason)
        self._wake_readers()

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _news_seconds(asked: str) -> float | None:
    """How often a reader wants to hear that it waits; None: never."""
    return max(MIN_NEWS_SECONDS, float(asked)) if _SECONDS.fullmatch(asked) else None


def gathered(parts: list[memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes, many short parts as one."""
    short = bytearray()
    for part in parts:
        if part.nbytes < SHORT_BYTES:
            short += part
        if short and (part.nbytes >= SHORT_BYTES or len(short) >= 16 * SHORT_BYTES):
            yield bytes(short)
            short.clear()
        if part.nbytes >= SHORT_BYTES:
            yield part
    if short:
        yield bytes(short)


def listen(host: str) -> socket.socket:
    """A listening socket on ``host``, on all interfaces where ``host`` is no address of this machine (behind a NAT)."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = open_socket(family, kind, protocol)
    try:
        listener.setblocking(False)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            log.info("not an address of this machine, serving on all interfaces", host=host)
            listener.bind(("", 0))
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener
