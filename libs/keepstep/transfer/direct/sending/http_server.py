"""The serving half of ``HTTPTransport``: one thread, one asyncio loop, raw sockets.

``http_requests`` lists the requests. An asyncio transport copies the bytes that it cannot send at once, whereas
``sock_sendall`` sends from the snapshot itself. One thread was faster than a thread for each reader (4.7 against
2.8 GB/s on one stream over loopback: smaller pieces stay in the cache), and a slow reader costs only its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import msgpack

from keepstep.connection.rate_limiter import RateLimiter
from keepstep.state.errors import UnsupportedValue
from keepstep.state.staging import Snapshot
from keepstep.transfer.direct import holders
from keepstep.transfer.direct.http_requests import (
    Access,
    Request,
    RequestError,
    parse_request,
    read_head,
)
from keepstep.transfer.direct.sending.leases import LEASE_ENDED, Lease, Leases
from keepstep.transfer.direct.sending.response_writer import ResponseWriter, join_short
from keepstep.transfer.peer_choice import PEERS_AT_ONCE
from keepstep.transfer.state_transfer import CANNOT_BE_SENT
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.fork_safety import open_socket
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import Thread

MAX_CONNECTIONS = 256
SHUTDOWN_TIMEOUT_SECONDS = 10.0
TURN_SECONDS = 0.15
"""Longest time for which one other joiner has the uplink to itself."""

log = get_logger("keepstep.transfer")


class CheckpointServer:
    """Serves one snapshot at a time, on a thread of its own. The public methods are safe to call from any thread.

    Args:
        host: address to listen on.
        timeout: longest time that a reader waits for a step, and longest time without progress of a reader; seconds.
        token: token of the job. Empty: any reader is served.
        limiter: bandwidth limit of all readers together. None: no limit.
    """

    def __init__(self, host: str, timeout: float, token: ClientToken, limiter: RateLimiter | None = None) -> None:
        self._timeout = timeout
        self._listener = listen(host)
        address, self.port = self._listener.getsockname()[:2]
        self.is_loopback = ipaddress.ip_address(address).is_loopback
        self._access = Access(host, self.is_loopback, token)
        self._to_serve: Snapshot | None = None
        self._is_refusing = False
        self._served: Snapshot | None = None
        """The value of ``_to_serve`` on the thread of the server."""
        self._newest_step = -1
        self._refused: tuple[int, HTTPStatus, str] | None = None
        """A step that has no snapshot, and the reason."""
        self.served_at = 0.0
        """When a part of a chunk was last sent to another joiner; monotonic time."""
        self._find_chunk: Callable[[bytes], list[memoryview] | None] | None = None
        self._turns = asyncio.Semaphore(PEERS_AT_ONCE)
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._failures_logged = LogLimiter(max_keys=2)
        self._loop = asyncio.new_event_loop()
        self._leases = Leases(self._loop, timeout)
        self._writer = ResponseWriter(self._loop, timeout, limiter or RateLimiter(None))
        self._stopping = asyncio.Event()
        self._thread = Thread(target=self._run, name="keepstep-checkpoint-server", daemon=True)
        self._thread.start()

    def serve(self, snapshot: Snapshot | None) -> None:
        """Serve ``snapshot`` to new readers. None: new readers wait. Earlier readers continue."""
        if snapshot is not None or self._to_serve is not None or self._is_refusing:  # each step ends with None
            self._to_serve, self._is_refusing = snapshot, False
            self._call(self._set_served, snapshot)

    def refuse(self, step: int, reason: str, *, lasting: bool) -> None:
        """Answer requests for ``step`` with ``reason`` until the next ``serve``. ``lasting``: see the transport."""
        self._is_refusing = True
        status = CANNOT_BE_SENT if lasting else HTTPStatus.SERVICE_UNAVAILABLE
        self._call(self._set_refused, step, status, reason)

    def serve_chunks(self, find_chunk: Callable[[bytes], list[memoryview] | None] | None) -> None:
        """Serve single chunks to other joiners.

        Args:
            find_chunk: returns the memory of the chunk with a digest. The memory may change after the chunks are no
                longer served: a chunk being sent then arrives with a wrong digest. None: serve no chunks.
        """
        self._find_chunk = find_chunk

    def disconnect_readers(self, snapshot: Snapshot) -> None:
        """End the transfers of all readers of ``snapshot``. Does not wait."""
        self._call(self._leases.end_all, snapshot)

    def stop(self, wait: bool) -> None:
        """Close the port and every connection.

        Args:
            wait: wait for the end of the thread, at most ``SHUTDOWN_TIMEOUT_SECONDS``.
        """
        self._call(self._stopping.set)
        if wait:
            self._thread.join(SHUTDOWN_TIMEOUT_SECONDS)
            if self._thread.is_alive():
                log.error("checkpoint server did not stop in time", port=self.port, seconds=SHUTDOWN_TIMEOUT_SECONDS)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("checkpoint server has already stopped", port=self.port)

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
            self._leases.end_all()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    # ---- connections

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._warn("connections not accepted; retrying", reason=str(error))
            self._loop.remove_reader(self._listener)
            self._loop.call_later(0.1, self._accept_again)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._warn("too many connections to the checkpoint server", peer=peer[0], limit=MAX_CONNECTIONS)
            connection.close()
            return
        task = self._loop.create_task(self._handle_connection(connection, peer[0]))
        self._connections.add(task)
        task.add_done_callback(partial(self._remove_connection, connection))

    def _warn(self, event: str, **fields: Any) -> None:
        if self._failures_logged.take(time.monotonic(), event) is not None:
            log.warning(event, port=self.port, **fields)

    def _accept_again(self) -> None:
        if not self._stopping.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _remove_connection(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected error in the checkpoint server", exc_info=error)

    async def _handle_connection(self, connection: socket.socket, peer: str) -> None:
        """Answer the requests of a connection in order."""
        received = bytearray()
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    if (head := await read_head(self._loop, connection, received)) is None:
                        return
                    await self._answer(connection, parse_request(head, self._access))
                except RequestError as error:
                    body = msgpack.packb({"reason": error.reason})
                    await self._writer.send_head(connection, error.status, len(body), body=body)
                    if error.status == HTTPStatus.BAD_REQUEST:
                        log.warning("bad request to the checkpoint server", peer=peer, reason=error.reason)
                        return
        except OSError as error:
            log.info("connection of a reader ended", peer=peer, reason=str(error) or "timeout")

    async def _answer(self, connection: socket.socket, request: Request) -> None:
        match request.method, request.kind:
            case "GET", "checkpoint" if request.name.isdecimal():
                await self._send_manifest(connection, await self._grant_lease(request))
            case "GET", "content" if request.name.isdecimal():
                lease = await self._grant_lease(request)
                content = lease.snapshot.content_bytes
                await self._writer.send_head(connection, 200, len(content), f"Keepstep-Lease: {lease.name}", content)
            case "GET", "manifest":
                await self._send_manifest(connection, self._leases.get(request.name))
            case "GET", "chunk":
                await self._send_chunk(connection, request)
            case "GET", "lease":
                await self._send_range(connection, request)
            case "GET", "holders":
                await self._send_holders(connection, request)
            case "DELETE", "lease":
                self._leases.end(self._leases.get(request.name).name)
                await self._writer.send_head(connection, 204, 0)
            case _:
                raise RequestError(
                    HTTPStatus.BAD_REQUEST,
                    f"invalid request {request.method} /{request.kind}/{request.name}: expected GET /checkpoint/<step>",
                )

    # ---- snapshots

    async def _grant_lease(self, request: Request) -> Lease:
        """Return a new lease on the snapshot of the requested step, as soon as it is served."""
        return self._leases.grant(await self._find_snapshot(int(request.name), min(request.wait, self._timeout)))

    async def _find_snapshot(self, step: int, wait: float) -> Snapshot:
        """Wait for the snapshot of ``step``, and hold it."""
        deadline = self._loop.time() + wait
        while True:
            served = self._served
            if served is not None and served.step == step and served.hold():
                return served
            if self._refused is not None and self._refused[0] == step:
                _, status, reason = self._refused
                raise RequestError(status, f"the source has no snapshot of step {step}: {reason}")
            if self._newest_step > step:
                raise RequestError(
                    HTTPStatus.GONE, f"step {step} is no longer available: the newest step is {self._newest_step}"
                )
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                newest = f"the newest step is {self._newest_step}" if self._newest_step >= 0 else "no step is staged"
                raise RequestError(
                    HTTPStatus.NOT_FOUND, f"timed out: step {step} was not staged within {wait:.1f} s; {newest}"
                ) from None

    async def _send_manifest(self, connection: socket.socket, lease: Lease) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                manifest = await asyncio.shield(asyncio.wrap_future(lease.snapshot.manifest))
            line = f"Keepstep-Lease: {lease.name}"
            await self._writer.send_head(connection, 200, len(manifest), line, manifest)
        except UnsupportedValue as error:
            self._leases.end(lease.name)
            raise RequestError(CANNOT_BE_SENT, str(error)) from error
        except BaseException:
            self._leases.end(lease.name)
            raise

    async def _send_range(self, connection: socket.socket, request: Request) -> None:
        lease = self._leases.get(request.name)
        snapshot = lease.snapshot
        first, last = request.byte_range(len(snapshot.pack))
        if not snapshot.hold():
            raise RequestError(HTTPStatus.GONE, LEASE_ENDED)
        task = asyncio.current_task()
        assert task is not None
        lease.senders.add(task)
        report = partial(self._writer.send_queue_report, connection)
        line = f"Content-Range: bytes {first}-{last}/{len(snapshot.pack)}"
        try:
            async with self._leases.turn(lease, report, request.queue_report_seconds):
                await self._writer.send_head(connection, 206, last + 1 - first, line)
                part = snapshot.pack[first : last + 1]
                await self._writer.send_in_pieces(connection, part, partial(self._leases.record_progress, lease))
        finally:
            lease.senders.discard(task)
            snapshot.release()

    async def _send_holders(self, connection: socket.socket, request: Request) -> None:
        lease = self._leases.get(request.name)
        try:
            lease.holder = holders.read_joiner_fields(request.fields)
        except ValueError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        self._leases.renew(lease)
        body = holders.pack_holders(self._leases.other_holders(lease))
        await self._writer.send_head(connection, 200, len(body), body=body)

    def _set_served(self, snapshot: Snapshot | None) -> None:
        self._served, self._refused = snapshot, None
        self._newest_step = -1 if snapshot is None else snapshot.step  # steps of a job may go back
        self._wake_readers()

    def _set_refused(self, step: int, status: HTTPStatus, reason: str) -> None:
        self._refused = (step, status, reason)
        self._wake_readers()

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- chunks for other joiners

    async def _send_chunk(self, connection: socket.socket, request: Request) -> None:
        find_chunk = self._find_chunk  # another thread may set it to None
        parts = find_chunk(request.digest) if find_chunk is not None else None
        if parts is None:
            raise RequestError(HTTPStatus.NOT_FOUND, "this process does not have the chunk")
        if self._turns.locked():
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "busy with other joiners; retry, or ask another joiner")
        async with self._turn():
            await self._writer.send_head(connection, 200, sum(part.nbytes for part in parts))
            for part in join_short(parts):
                await self._writer.send_in_pieces(connection, part, self._record_chunk_progress)
            await self._writer.drain(connection, TURN_SECONDS)

    def _record_chunk_progress(self, _now: float) -> None:
        self.served_at = time.monotonic()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Limit the joiners served at a time: one that has a whole chunk passes it on while others still wait."""
        await self._turns.acquire()
        end = self._loop.call_later(TURN_SECONDS, self._turns.release)
        try:
            yield
        finally:
            if self._loop.time() < end.when():
                end.cancel()
                self._turns.release()


def listen(host: str) -> socket.socket:
    """Return a listening socket on ``host``, or on all interfaces if no interface has the address (behind a NAT)."""
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
            log.info("no interface has the address; listening on all interfaces", host=host)
            listener.bind(("", 0))
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener
