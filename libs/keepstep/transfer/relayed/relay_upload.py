"""Background upload of the live state from the healthy groups to the relays.

``UploadShare`` chooses the chunks of each source. All groups upload a state with the same root digest.

The threads are daemons, so that a script that ends does not wait for them. Python waits for the threads of an executor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.relay_requests import put_chunk
from keepstep.relay_client.upload_share import UploadShare
from keepstep.state.errors import TransferError, TransferTimeout
from keepstep.state.staging import Snapshot
from keepstep.transfer.exchange import Exchange
from keepstep.transfer.relayed.live_checkpoint import LiveCheckpoint, home
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, read_envelope
from keepstep_mesh.threads.starting import Thread

STALL_SECONDS = 10.0
UPLOAD_POLL_SECONDS = 0.1
"""Interval at which a relay is asked which chunks of other groups are missing."""
MAX_FAILURES = 5
"""Failures of a relay in a row, after which another relay gets its chunks."""
MAX_FAILURES_OF_ALL = 9
"""The same if no other relay works: about 7 s, in which a relay may restart."""
UPLOAD_BACKOFF = Backoff(first=0.1, most=2.0)
END_SECONDS = 10.0
MAX_COPIES = 3
"""A group uploads at most this many times the size of the state, even if relays report more missing chunks."""
FULL = 507

log = get_logger("keepstep.checkpointing")


class _StatesDiffer(TransferError):
    """The groups have different states of one step."""


class Upload:
    """The upload of one snapshot. Call ``start`` once; call ``abort`` from any thread.

    Args:
        snapshot: held by the caller; the upload releases it when it ends.
        exchange: the groups that have, and that need, the state.
        relays: at least one.
        timeout: time limit in seconds.
        limiter: bandwidth limit of the chunks.
    """

    def __init__(
        self, snapshot: Snapshot, exchange: Exchange, relays: list[Endpoint], timeout: float, limiter: RateLimiter
    ) -> None:
        self._snapshot = snapshot
        self._exchange = exchange
        self._relays = {relay.address: relay for relay in relays}
        self._failures = dict.fromkeys(self._relays, 0)
        self._limiter = limiter
        self._checkpoint = LiveCheckpoint(exchange)
        self._deadline = Deadline(timeout, f"step {snapshot.step} was not uploaded")
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._sent = 0
        self._thread = Thread(target=self._run, name="keepstep-upload", daemon=True)

    def start(self) -> None:
        """Start the thread of the upload."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the upload has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the upload, at most ``END_SECONDS``."""
        self._thread.join(END_SECONDS)

    def abort(self) -> None:
        """End the upload soon. Does not wait."""
        self._ended.set()
        with self._lock:
            for connection in self._open:
                connection.interrupt()

    def _run(self) -> None:
        """Upload the state. Never raises: if the upload fails, joiners receive the state from the source."""
        started = time.monotonic()
        try:
            self._manifest = self._snapshot.manifest.result(self._deadline.remaining())
            self._table = read_envelope(self._manifest)
            self._upload()
        except (TransferError, TransferTimeout, TimeoutError, KeepstepError) as error:
            if not self._ended.is_set():
                log.warning("live state not uploaded", step=self._snapshot.step, reason=str(error))
        except Exception:
            log.exception("unexpected error in the upload of live state", step=self._snapshot.step)
        else:
            took, aborted = round(time.monotonic() - started, 3), self._ended.is_set()
            what = "upload of live state aborted" if aborted else "live state uploaded"
            log.info(what, step=self._snapshot.step, bytes=self._sent, seconds=took)
        finally:
            self._snapshot.release()

    def _upload(self) -> None:
        chunks = len(self._table.chunk_digests)
        sources, place = len(self._exchange.sources), self._exchange.sources.index(self._exchange.replica_id)
        share = UploadShare(place, sources, chunks)
        while not self._ended.is_set():
            missing = self._announce()
            if not missing and self._finish():
                return
            began = time.monotonic()
            if mine := share.choose(missing, began):
                self._put([chunk for chunk in range(chunks) if mine >> chunk & 1])
                share.sent(mine, time.monotonic() - began)
            else:
                self._ended.wait(UPLOAD_POLL_SECONDS)

    def _announce(self) -> int:
        """Announce the state to the relays, and return the chunks that are missing at their relay, as bits."""
        found = {}
        for address in self._alive():
            with self._failing(address), self._connected(address) as connection:
                plan = self._checkpoint.announce(connection, self._table.root)
                if not plan.agrees:
                    raise _StatesDiffer(
                        f"the states of the groups differ: another group uploads a different state of step "
                        f"{self._snapshot.step}"
                    )
                if not plan.has_manifest:
                    plan = self._checkpoint.put_manifest(connection, self._manifest)
                found[address] = plan.missing
        alive = self._alive()
        return sum(
            1 << chunk
            for chunk, digest in enumerate(self._table.chunk_digests)
            if (found.get(where := home(digest, alive)) is None) or found[where] >> chunk & 1
        )

    def _finish(self) -> bool:
        """Report to all relays that the upload is complete. Returns whether all of them confirmed it."""
        confirmed, alive = 0, self._alive()
        for address in alive:
            with self._failing(address), self._connected(address) as connection:
                with _full_disk_allowed():
                    self._checkpoint.report(connection, part=len(self._relays) > 1)
                confirmed += 1
        return confirmed == len(alive)

    def _put(self, chunks: list[int]) -> None:
        if self._sent > MAX_COPIES * len(self._snapshot.pack):
            raise TransferError(f"chunks are missing at the relays after {MAX_COPIES} uploads of the state")
        alive = self._alive()
        by_relay: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
        for chunk in chunks:
            digest = self._table.chunk_digests[chunk]
            by_relay[home(digest, alive)][digest] = chunk  # upload equal chunks once
        errors: list[BaseException] = []

        def put(address: str, numbers: Iterable[int]) -> None:
            try:
                self._put_some(address, numbers)
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)

        streams = [
            Thread(target=put, args=(address, parts.values()), name="keepstep-upload-stream", daemon=True)
            for address, parts in by_relay.items()
        ]
        for one in streams:
            one.start()
        for one in streams:
            one.join()
        if errors:
            raise errors[0]

    def _put_some(self, address: str, chunks: Iterable[int]) -> None:
        with self._failing(address), self._connected(address) as connection:
            for chunk in chunks:
                data = self._snapshot.pack[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
                delay = self._limiter.delay(data.nbytes, time.monotonic())
                if self._ended.wait(min(delay, self._deadline.remaining())):
                    return
                with _full_disk_allowed():
                    put_chunk(connection, self._table.chunk_digests[chunk], data)
                with self._lock:
                    self._sent += data.nbytes
                self._failures[address] = 0

    # ---- relays that fail

    def _alive(self) -> list[str]:
        for most in (MAX_FAILURES, MAX_FAILURES_OF_ALL):
            if alive := [address for address, failures in self._failures.items() if failures < most]:
                return alive
        raise TransferError("every relay failed; joiners receive the state from the source")

    @contextlib.contextmanager
    def _connected(self, address: str) -> Iterator[Connection]:
        connection = Connection(self._relays[address], self._deadline, STALL_SECONDS)
        with self._lock:
            self._open.add(connection)
        try:
            if self._ended.is_set():
                raise BrokenConnection("the upload was aborted")
            connection.connect()
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
                connection.close()

    @contextlib.contextmanager
    def _failing(self, address: str) -> Iterator[None]:
        """Count an error of a relay, and pause before the next attempt."""
        try:
            yield
        except TransferTimeout:
            raise
        except (BrokenConnection, TransferError) as error:
            if self._ended.is_set():
                return
            with self._lock:
                failures = MAX_FAILURES_OF_ALL if isinstance(error, _StatesDiffer) else self._failures[address] + 1
                self._failures[address] = failures
            log.warning("relay failed an upload", relay=address, failures=failures, reason=str(error))
            pause = max(getattr(error, "retry_after", 0.0), UPLOAD_BACKOFF.seconds(failures))
            self._ended.wait(min(pause, UPLOAD_BACKOFF.most, self._deadline.remaining()))


@contextlib.contextmanager
def _full_disk_allowed() -> Iterator[None]:
    """Ignore that the disk of the relay is full: the relay serves the chunk from memory."""
    try:
        yield
    except Refusal as refusal:
        if refusal.status != FULL:
            raise
