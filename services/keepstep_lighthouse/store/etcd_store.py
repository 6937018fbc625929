"""A store in etcd, through the ``etcd3`` package.

The package blocks, so calls run in a few threads, and each watch in a thread of its own. This module adds to it:
several endpoints (one is used until it fails, then the next), a deadline for each call, the difference between a
write that failed and one whose outcome is unknown, and watches that survive a lost connection or a compaction by
reading their keys again and reporting the differences.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from keepstep_lighthouse.store.contract import (
    Change,
    Compare,
    OutcomeUnknownError,
    Store,
    StoreError,
    Watch,
    Write,
    WriteFailedError,
)
from keepstep_lighthouse.store.etcd_address import EtcdAddress
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.threads.starting import Thread, ThreadPoolExecutor

# etcd3 ships code generated for an old protobuf; the new one accepts it only in its Python implementation.
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of that old code, at every import
        import etcd3
        import grpc
        from etcd3 import etcdrpc
except ImportError as error:
    raise StoreError(f"etcd needs the etcd3 package: pip install 'keepstep[services]' ({error})") from error
except TypeError as error:
    raise StoreError(
        "protobuf was imported before etcd3; set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python for this process"
    ) from error

CALL_SECONDS = 2.0
"""Time limit of one call to one endpoint."""
WATCH_BACKOFF = Backoff(first=0.05, most=1.0)
THREADS = 4
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # etcd accepts at most one ping in 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
_NOT_SENT = "failed to connect to all addresses"
"""Beginning of gRPC's messages about calls that never left this machine."""
NO_SPACE = "database space exceeded"
NO_SPACE_ADVICE = (
    "its database has reached --quota-backend-bytes: compact and defragment it, then run etcdctl alarm disarm"
)
_NOTHING_DONE = frozenset(
    (
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
)
"""Codes with which etcd refuses a call."""

T = TypeVar("T")

log = get_logger("keepstep.lighthouse.etcd")


class _Failure(Exception):
    """A failed call, classified."""

    def __init__(self, error: BaseException) -> None:
        # etcd3 replaces some of gRPC's errors and drops their text
        known = error if isinstance(error, grpc.RpcError) else error.__context__
        rpc: Any = known if isinstance(known, grpc.RpcError) and hasattr(known, "code") else None
        self.code = rpc.code() if rpc else None
        details = (rpc.details() if rpc else str(error)) or type(error).__name__
        super().__init__(details)
        self.not_sent = details.startswith(_NOT_SENT)
        self.nothing_done = self.not_sent or self.code in _NOTHING_DONE
        self.refused = not self.not_sent and self.nothing_done
        """Whether every endpoint would give the same answer."""
        self.token_is_over = self.code is grpc.StatusCode.UNAUTHENTICATED


class EtcdStore(Store):
    """Connects with the first call, and again after a failure. ``address``: etcd and prefix."""

    exclusive = False

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._base = f"{address.prefix}/"
        self._pool = ThreadPoolExecutor(THREADS, "keepstep-etcd")
        self._lock = threading.Lock()
        self._client: Any = None
        self._at = 0
        """Index of the endpoint in use."""
        self._closed = threading.Event()
        self._watchers: set[_Watcher] = set()

    # ---- reads

    async def get(self, key: str) -> bytes | None:
        return await self._read(lambda client: client.get(self._base + key)[0])

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        return (await self._read(lambda client: self._range(client, prefix)))[0]

    def _range(self, client: Any, prefix: str) -> tuple[dict[str, bytes], int]:
        """Return the keys below ``prefix``, and their revision."""
        answer = client.get_prefix_response(self._base + prefix, sort_order="ascend")
        skip = len(self._base)
        return {kv.key.decode()[skip:]: kv.value for kv in answer.kvs}, answer.header.revision

    # ---- writes

    async def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        def act(client: Any) -> bool:
            make = client.transactions
            compares = [
                make.create(self._base + one.key) == 0
                if one.value is None
                else make.value(self._base + one.key) == one.value
                for one in compare
            ]
            operations = [
                make.delete(self._base + one.key)
                if one.value is None
                else make.put(self._base + one.key, one.value, one.lease or None)
                for one in writes
            ]
            held, _ = client.transaction(compares, operations, [])
            return bool(held)

        return await self._write(act)

    async def grant_lease(self, ttl: float) -> int:
        number = await self._write(lambda client: client.lease(max(1, math.ceil(ttl))).id)
        return int(number)

    async def keep_alive(self, lease: int) -> None:
        answer = await self._write(lambda client: next(iter(client.refresh_lease(lease)), None))
        if answer is None or answer.TTL <= 0:
            raise WriteFailedError(f"lease {lease} has expired")

    async def revoke(self, lease: int) -> None:
        def act(client: Any) -> None:
            try:
                client.revoke_lease(lease)
            except grpc.RpcError as error:
                if _Failure(error).code is not grpc.StatusCode.NOT_FOUND:
                    raise

        await self._write(act)

    # ---- the connection

    async def _read(self, call: Callable[[Any], T]) -> T:
        return await self._ask(call, changes=False)

    async def _write(self, call: Callable[[Any], T]) -> T:
        return await self._ask(call, changes=True)

    async def _ask(self, call: Callable[[Any], T], *, changes: bool) -> T:
        """Run a call in a thread, at one endpoint after another. Do not repeat a sent call that ``changes`` keys."""

        def anywhere() -> T:
            for left in range(2 * len(self._address.endpoints), -1, -1):
                client = None
                try:
                    client = self._connected()
                    return call(client)
                except (etcd3.Etcd3Exception, grpc.RpcError, ValueError) as error:
                    failure = self._failed(client, error)
                    if changes and client is not None and not failure.nothing_done:
                        raise OutcomeUnknownError(f"etcd did not answer a write: {failure}") from error
                    if not left or (failure.refused and not failure.token_is_over):
                        if changes:
                            full = f"; {NO_SPACE_ADVICE}" if NO_SPACE in str(failure) else ""
                            raise WriteFailedError(f"etcd refused a write: {failure}{full}") from error
                        raise StoreError(f"cannot read from etcd: {failure}") from error
            raise AssertionError("unreachable")

        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._pool, anywhere)

    def _connected(self) -> Any:
        """Return the client. Called in a thread; raises the errors of etcd3, gRPC and certificate files."""
        with self._lock:
            self._check_open()
            if self._client is None:
                host, port = self._address.endpoints[self._at]
                one = self._address
                try:
                    client = etcd3.client(
                        host,
                        port,
                        ca_cert=one.ca,
                        cert_cert=one.cert,
                        cert_key=one.key,
                        timeout=CALL_SECONDS,
                        user=one.user,
                        password=one.password,
                        grpc_options=CHANNEL_OPTIONS,
                    )
                except OSError as error:
                    raise StoreError(f"cannot read a file of the etcd connection: {error}") from error
                except grpc.RpcError:
                    self._at = (self._at + 1) % len(self._address.endpoints)
                    raise
                client.call_credentials = (
                    None  # the token is in the metadata too, and without TLS gRPC accepts only that
                )
                self._client = client
            return self._client

    def _failed(self, client: Any, error: Exception) -> _Failure:
        """Switch to the next endpoint, unless etcd refused the call itself."""
        self._check_open()
        failure = _Failure(error)
        if client is not None and (not failure.refused or failure.token_is_over):
            with self._lock:
                if self._client is client:
                    if not failure.token_is_over:
                        self._at = (self._at + 1) % len(self._address.endpoints)
                        if len(self._address.endpoints) > 1:
                            host, port = self._address.endpoints[self._at]
                            log.warning(
                                "etcd endpoint failed; using the next one", reason=str(failure), next=f"{host}:{port}"
                            )
                    self._client = None
                    client.close()  # its watches break and continue at the next endpoint
        return failure

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreError("the store is closed")

    # ---- watches and the end

    def watch(self, prefix: str) -> Watch:
        self._check_open()
        watcher = _Watcher(self, prefix)
        self._watchers = {one for one in self._watchers if one.thread.is_alive()} | {watcher}
        watcher.thread.start()
        return watcher

    async def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()
        for watcher in self._watchers:
            watcher.end()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._join_watchers)
        self._pool.shutdown()

    def _join_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.thread.join(2 * CALL_SECONDS)


class _Watcher(Watch):
    """A thread that reads the keys once, follows their changes, and starts again when that fails."""

    def __init__(self, store: EtcdStore, prefix: str) -> None:
        super().__init__(prefix)
        self._store = store
        self._base = store._base  # noqa: SLF001 - one module
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, bytes] = {}
        self._started = asyncio.Event()
        self._stop = threading.Event()
        self._call: Any = None
        self._lock = threading.Lock()
        self.thread = Thread(target=self._run, name="keepstep-etcd-watch", daemon=True)

    async def __aenter__(self) -> Self:
        await self._started.wait()
        return self

    def end(self, error: StoreError | None = None) -> None:
        super().end(error)
        self._started.set()
        self._stop.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            client = None
            try:
                client = self._store._connected()  # noqa: SLF001
                revision = self._read(client)
                failures = 0
                self._follow(client, revision + 1)
            except StoreError:
                if self._store._closed.is_set():  # noqa: SLF001
                    return
            except (etcd3.Etcd3Exception, grpc.RpcError, ValueError) as error:
                if self._stop.is_set() or self._store._closed.is_set():  # noqa: SLF001
                    return
                failure = self._store._failed(client, error)  # noqa: SLF001
                log.debug("etcd watch broke; reading again", prefix=self.prefix, reason=str(failure))
            failures += 1
            self._stop.wait(WATCH_BACKOFF.seconds(failures))

    def _read(self, client: Any) -> int:
        now, revision = self._store._range(client, self.prefix)  # noqa: SLF001
        changes = [Change(key, None) for key in self._known if key not in now]
        changes += [Change(key, value) for key, value in now.items() if self._known.get(key) != value]
        self._known = now
        self._tell(changes)
        return revision

    def _follow(self, client: Any, revision: int) -> None:
        """Follow changes until the stream ends."""
        key = (self._base + self.prefix).encode()
        create = etcdrpc.WatchCreateRequest(key=key, range_end=_end_of_range(key), start_revision=revision)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(etcdrpc.WatchRequest(create_request=create))
        metadata = (*(client.metadata or ()), ("hasleader", "true"))  # otherwise a partitioned node stays silent
        call = etcdrpc.WatchStub(client.channel).Watch(
            iter(requests.get, None), credentials=client.call_credentials, metadata=metadata
        )
        with self._lock:
            self._call = call
        try:
            if not self._stop.is_set():
                self._take(call)
        finally:
            call.cancel()
            requests.put(None)

    def _take(self, call: Iterator[Any]) -> None:
        skip = len(self._base)
        for response in call:
            if response.canceled:  # the revision was compacted, or the node lost its leader
                return
            changes = []
            for event in response.events:
                key = event.kv.key.decode()[skip:]
                if event.type == event.DELETE:
                    self._known.pop(key, None)
                    changes.append(Change(key, None))
                else:
                    self._known[key] = event.kv.value
                    changes.append(Change(key, event.kv.value))
            self._tell(changes)

    def _tell(self, changes: list[Change]) -> None:
        def tell() -> None:
            self.tell(changes)
            self._started.set()

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the event loop has ended
            self._stop.set()


def _end_of_range(prefix: bytes) -> bytes:
    """Return the first key after all keys that start with ``prefix``."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))
