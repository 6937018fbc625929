"""The store through which the members of a quorum connect their process groups.

One member of a quorum hosts a ``KeyValueServer`` in its group server. Every member uses it through a
``RendezvousStore``, a ``torch.distributed.Store`` that Gloo and NCCL accept. docs/dependencies.md has what was measured
with a TCPStore in its place: no other thread can end its waits, and a frozen host blocks its calls beyond their limit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

import msgpack
from torch.distributed.distributed_c10d import Store

from keepstep.rendezvous.interruptible_store import InterruptibleStore
from keepstep.rendezvous.key_value_server import PATH, VERSION, KeyValueServer, RendezvousError, Table
from keepstep.runtime.connecting import connect
from keepstep_mesh.errors import AuthError
from keepstep_mesh.net.addresses import Lookup
from keepstep_mesh.net.fork_safety import open_socket
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.text import listed

__all__ = ["KeyValueServer", "RendezvousAbortedError", "RendezvousError", "RendezvousStore", "Table"]

MAX_ANSWER_BYTES = 256 << 20
"""Limit of an answer; larger than any table."""
MAX_REASON_BYTES = 500
MAX_NAMED_KEYS = 4
"""Limit of keys that an error lists."""
_REPEATABLE = frozenset({"wait", "check", "items", "set"})


class RendezvousAbortedError(RendezvousError):
    """``RendezvousStore.abort`` ended this wait."""


class RendezvousStore(InterruptibleStore):
    """One table of a rendezvous host, as a ``torch.distributed.Store``.

    Write each key once: the store caches the values that it reads.

    Args:
        address: ``http://host:port`` of the host.
        table: table on the host; default: the first one of job ``default``.
        timeout: limit of each call without its own timeout; default 60 s.
        token: token of the job; None: send no token.
        server: server in this process, to use instead of HTTP.
        version: lowest ``MemberInfo.rendezvous`` of the members, which limits the formats that they may store; or
            ``UNKNOWN_VERSION``.

    Raises:
        TimeoutError: a call exceeded its timeout.
        RendezvousError: a call failed because the host disconnected or the quorum is over.
        RendezvousAbortedError: another thread called ``abort``.
    """

    def __init__(
        self,
        address: str,
        table: Table | None = None,
        *,
        timeout: timedelta = timedelta(seconds=60),
        token: str | ClientToken | None = None,
        server: KeyValueServer | None = None,
        version: int = VERSION,
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self.version = version
        self.address = address
        self.host = _split(address)[0]
        self._table = table or Table()
        self._host: _LocalTable | _RemoteTable = (
            _LocalTable(server, self._table) if server else _RemoteTable(address, self._table, token)
        )
        self._seen: dict[str, bytes] = {}
        self._received = 0

    def abort(self, reason: str) -> None:
        """Make current waits and all later calls raise ``RendezvousAbortedError(reason)``."""
        self._host.abort(reason)

    def close(self) -> None:
        """Close the idle connections. The store remains usable and opens new ones."""
        self._host.close()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        if key not in self._seen:
            self.wait([key])
        return self._seen[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._seen[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. One answer contains all new values of the table."""
        missing = [key for key in keys if key not in self._seen]
        if not missing:
            return
        limit = timeout or self._timeout
        deadline = time.monotonic() + limit.total_seconds()
        while (items := self._host.wait(missing, self._received, deadline)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{listed(missing, MAX_NAMED_KEYS)} not set in the rendezvous at {self.address} within {limit}"
                )
        self._received += len(items)
        self._seen.update(items)
        for key in missing:
            if key not in self._seen:  # deleted and set again: it precedes the requested items
                self._seen.update(self._call("items", 0))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._seen for key in keys) or bool(self._call("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._call("compare_set", key, _bytes(expected), _bytes(desired)))

    def delete_key(self, key: str) -> bool:
        self._seen.pop(key, None)
        return bool(self._call("delete", key))

    def num_keys(self) -> int:
        return len(self._call("items", 0))

    def clone(self) -> Store:
        return self

    def has_extended_api(self) -> bool:
        return True

    def _call(self, operation: str, *arguments: Any) -> Any:
        return self._host.call(operation, arguments, time.monotonic() + self._timeout.total_seconds())


class _LocalTable:
    """A table of a server in this process."""

    def __init__(self, server: KeyValueServer, table: Table) -> None:
        self._server = server
        self._table = table
        self._lock = threading.Lock()
        self._waits: set[concurrent.futures.Future[None]] = set()
        self._aborted: str | None = None

    def call(self, operation: str, arguments: Sequence[Any], deadline: float) -> Any:  # noqa: ARG002
        self._check()
        return getattr(self._server, operation)(self._table, *arguments)

    def wait(self, keys: Sequence[str], received: int, deadline: float) -> list[tuple[str, bytes]] | None:
        arrival = self._server.wait(self._table, keys)
        with self._lock:
            self._waits.add(arrival)
        try:
            self._check()
            arrival.result(max(deadline - time.monotonic(), 0))
        except concurrent.futures.CancelledError:
            self._check()
            raise
        except TimeoutError:
            return None
        finally:
            arrival.cancel()
            with self._lock:
                self._waits.discard(arrival)
        return self._server.items(self._table, received)

    def abort(self, reason: str) -> None:
        with self._lock:
            self._aborted = self._aborted or reason
            waits = list(self._waits)
        for arrival in waits:
            arrival.cancel()

    def close(self) -> None:
        """Do nothing: a local table has no connections."""

    def _check(self) -> None:
        if self._aborted is not None:
            raise RendezvousAbortedError(self._aborted)


class _BoundedSocket(socket.socket):
    """A socket with a deadline ``end`` for all reads together; a socket's own timeout restarts with each read."""

    end = float("inf")

    def recv_into(self, *args: Any, **how: Any) -> int:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer of the rendezvous host was not complete in time")
        self.settimeout(left)
        return super().recv_into(*args, **how)


class _RemoteTable:
    """A table of a server in another process, over blocking HTTP connections.

    The calls come from C++ threads that wait anyway; without a switch to another thread a round trip takes a third
    less. The class owns its connections, because ``abort`` shuts down the sockets of calls that wait.
    """

    def __init__(self, address: str, table: Table, token: str | ClientToken | None) -> None:
        self._peer = _split(address)
        self._table = [table.job, table.epoch, table.quorum_id, table.group_rank]
        self._token = ClientToken.of(token)
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[socket.socket] = set()
        self._lookups: set[Lookup] = set()
        self._connected_once = False
        self._aborted = threading.Event()
        self._reason = ""

    def wait(self, keys: Sequence[str], received: int, deadline: float) -> list[tuple[str, bytes]] | None:
        items = self.call("wait", (list(keys), received, max(deadline - time.monotonic(), 0.0)), deadline)
        return cast("list[tuple[str, bytes]] | None", items)

    def call(self, operation: str, arguments: Sequence[Any], deadline: float) -> Any:
        body = cast("bytes", msgpack.packb([*self._table, operation, *arguments]))
        while True:
            connection, fresh = self._connection(deadline)
            try:
                return self._exchange(connection, body, deadline)
            except (OSError, http.client.HTTPException) as error:
                if self._aborted.is_set():
                    raise RendezvousAbortedError(self._reason) from error
                if isinstance(error, TimeoutError):
                    raise TimeoutError(
                        f"the rendezvous host {self._peer} did not answer {operation!r} in time"
                    ) from error
                if fresh or operation not in _REPEATABLE:
                    self._raise_host_lost(error)

    def abort(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason
            self._aborted.set()
            for sock in self._busy:
                with contextlib.suppress(OSError):  # not connected yet, or already closed by the host
                    sock.shutdown(socket.SHUT_RDWR)
            for lookup in self._lookups:
                lookup.interrupt()
        self.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes, deadline: float) -> Any:
        sock = cast("_BoundedSocket", connection.sock)
        sock.end = max(deadline, time.monotonic()) + 1.0
        sock.settimeout(sock.end - time.monotonic())
        keep = False
        try:
            headers = {"Content-Type": "application/msgpack", **self._token.peer_headers()}
            connection.request("POST", PATH, body, headers)
            response = connection.getresponse()
            good = response.status == http.HTTPStatus.OK
            if good and (response.length is None or response.length > MAX_ANSWER_BYTES):
                size = "unknown size" if response.length is None else f"{response.length} bytes"
                raise RendezvousError(
                    f"answer of the rendezvous host {self._peer} too large: {size} (limit {MAX_ANSWER_BYTES} bytes)"
                )
            answer = response.read(None if good else MAX_REASON_BYTES)
            keep = good and not response.will_close
        finally:
            with self._lock:
                self._busy.discard(sock)
                keep = keep and not self._aborted.is_set()
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()
        if good:
            return self._unpacked(answer)
        if response.status == http.HTTPStatus.UNAUTHORIZED:
            raise AuthError(
                f"the rendezvous host {self._peer} refused the token of this process: use the same token in all groups"
            )
        detail = answer.decode(errors="replace")
        raise RendezvousError(f"the rendezvous host {self._peer} refused ({response.status}): {detail}")

    def _unpacked(self, answer: bytes) -> Any:
        try:
            return msgpack.unpackb(answer, use_list=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise RendezvousError(
                f"invalid answer of the rendezvous host {self._peer}: not msgpack: {error}"
            ) from error

    def _connection(self, deadline: float) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, marked as busy, and whether it is new."""
        with self._lock:
            self._check()
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection.sock)
                return connection, False
        while True:
            try:
                return self._connect(deadline), True
            except OSError as error:
                self._check()
                if self._connected_once or isinstance(error, socket.gaierror):
                    self._raise_host_lost(error)
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"the rendezvous host {self._peer} was not reachable in time: {error}"
                    ) from error
            self._aborted.wait(0.02)

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        family, kind, protocol, _, peer = self._look_up(deadline)[0]
        sock = open_socket(family, kind, protocol, _BoundedSocket)
        with self._lock:
            self._busy.add(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connect(sock, peer, max(deadline - time.monotonic(), 0.001), self._check)
        except BaseException:
            with self._lock:
                self._busy.discard(sock)
            sock.close()
            raise
        self._connected_once = True
        connection = http.client.HTTPConnection(*self._peer)
        connection.sock = sock
        return connection

    def _look_up(self, deadline: float) -> list[Any]:
        lookup = Lookup(*self._peer)
        with self._lock:
            self._check()
            self._lookups.add(lookup)
        try:
            return lookup.result(max(deadline - time.monotonic(), 0.0))
        finally:
            with self._lock:
                self._lookups.discard(lookup)

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RendezvousAbortedError(self._reason)

    def _raise_host_lost(self, error: Exception) -> NoReturn:
        raise RendezvousError(f"lost the rendezvous host {self._peer}: {str(error) or type(error).__name__}") from error


def _split(address: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
    if not parts.hostname or not parts.port:
        raise ValueError(f"invalid rendezvous address {address!r}: expected http://host:port")
    return parts.hostname, parts.port


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
