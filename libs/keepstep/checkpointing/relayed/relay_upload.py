"""A healthy group's part in bringing the live state to the relays, in the background.

Source k of n uploads the chunks k, k + n, ... first. When all of those are there, and some of the others still are not
and do not come either, it uploads them too: their group may be gone. It does so only with the state that the relay
knows, chunk by chunk the same.

Its threads are daemons: a script that just ends does not wait for them. Python would for those of an executor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from keepstep.checkpointing.direct.connection import BrokenConnection, Connection, Deadline, Endpoint, Refusal
from keepstep.checkpointing.direct.rate_limiter import RateLimiter
from keepstep.checkpointing.errors import TransferError, TransferTimeout
from keepstep.checkpointing.relayed.relay_client import LiveCheckpoint, home, put_chunk
from keepstep.checkpointing.state.staging import Snapshot
from keepstep.checkpointing.transport import Exchange
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, read_envelope

STALL_SECONDS = 10.0
UPLOAD_POLL_SECONDS = 0.1
"""Between two looks at what other groups have still to upload."""
UPLOAD_PATIENCE_SECONDS = 0.5
PATIENCE_CHUNKS = 4
"""Without a chunk of theirs for so long, or as long as so many of ours took, if that is longer, theirs are uploaded
too.
"""
MAX_FAILURES = 5
"""Of one relay in a row, after which another has its part."""
MAX_FAILURES_OF_ALL = 9
"""Of one in a row where no other works, which takes some 7 s: it may be on its way back."""
UPLOAD_BACKOFF = Backoff(first=0.1, most=2.0)
END_SECONDS = 10.0
MAX_COPIES = 3
"""Of the state that go up from one group, whatever relays say that they lack."""
FULL = 507

log = get_logger("keepstep.checkpointing")


class _StatesDiffer(TransferError):
    """The groups do not have the same state."""


class Upload:
    """One snapshot, which is held until the end. ``start`` it once; ``abort`` it from any thread."""

    def __init__(
        self, snapshot: Snapshot, exchange: Exchange, relays: list[Endpoint], timeout: float, budget: RateLimiter
    ) -> None:
        self._snapshot = snapshot
        self._exchange = exchange
        self._relays = {relay.address: relay for relay in relays}
        self._failures = dict.fromkeys(self._relays, 0)
        self._budget = budget
        self._checkpoint = LiveCheckpoint(exchange)
        self._deadline = Deadline(timeout, f"step {snapshot.step} was not uploaded")
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._sent = 0
        self._thread = threading.Thread(target=self._run, name="keepstep-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(END_SECONDS)

    def abort(self) -> None:
        self._ended.set()
        with self._lock:
            for connection in self._open:
                connection.interrupt()

    def _run(self) -> None:
        """Never raises: without it the joiner takes the state from its source."""
        started = time.monotonic()
        try:
            self._manifest = self._snapshot.manifest.result(self._deadline.remaining())
            self._table = read_envelope(self._manifest)
            self._upload()
        except (TransferError, TransferTimeout, TimeoutError, KeepstepError) as error:
            if not self._ended.is_set():
                log.warning("live state not uploaded", step=self._snapshot.step, reason=str(error))
        except Exception:
            log.exception("fault while uploading live state", step=self._snapshot.step)
        else:
            took, aborted = round(time.monotonic() - started, 3), self._ended.is_set()
            what = "upload of live state aborted" if aborted else "live state uploaded"
            log.info(what, step=self._snapshot.step, bytes=self._sent, seconds=took)
        finally:
            self._snapshot.release()

    def _upload(self) -> None:
        chunks = len(self._table.chunk_digests)
        sources, place = len(self._exchange.sources), self._exchange.sources.index(self._exchange.replica_id)
        share = sum(1 << chunk for chunk in range(place, chunks, sources))
        lacked, changed, patience = -1, time.monotonic(), UPLOAD_PATIENCE_SECONDS
        while not self._ended.is_set():
            lacks = self._lacking()
            if not lacks and self._finish():
                return
            if lacks != lacked:
                lacked, changed = lacks, time.monotonic()
            mine = lacks & share
            if not mine and time.monotonic() - changed > patience:
                mine, changed = lacks, time.monotonic()
            if mine:
                began = time.monotonic()
                self._put([chunk for chunk in range(chunks) if mine >> chunk & 1])
                pace = (time.monotonic() - began) / mine.bit_count()
                patience = max(UPLOAD_PATIENCE_SECONDS, PATIENCE_CHUNKS * pace)
            else:
                self._ended.wait(UPLOAD_POLL_SECONDS)

    def _lacking(self) -> int:
        """The chunks that are not where they belong, as bits. The relays know the state from then on."""
        found = {}
        for address in self._alive():
            with self._failing(address), self._connected(address) as connection:
                plan = self._checkpoint.begin(connection, self._table.root)
                if not plan.agrees:
                    raise _StatesDiffer(
                        f"it has another state of step {self._snapshot.step} from another group: the groups' states "
                        f"differ"
                    )
                if not plan.has_manifest:
                    plan = self._checkpoint.put_manifest(connection, self._manifest)
                found[address] = plan.lacks
        alive = self._alive()
        return sum(
            1 << chunk
            for chunk, digest in enumerate(self._table.chunk_digests)
            if (found.get(where := home(digest, alive)) is None) or found[where] >> chunk & 1
        )

    def _finish(self) -> bool:
        """Whether all relays know that no more comes. Of several, none needs to have all of it."""
        told, alive = 0, self._alive()
        for address in alive:
            with self._failing(address), self._connected(address) as connection:
                with _full_disk_allowed():
                    self._checkpoint.finish(connection, part=len(self._relays) > 1)
                told += 1
        return told == len(alive)

    def _put(self, chunks: list[int]) -> None:
        if self._sent > MAX_COPIES * len(self._snapshot.pack):
            raise TransferError(f"relays lack what was sent {MAX_COPIES} times")
        alive = self._alive()
        by_relay: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
        for chunk in chunks:
            digest = self._table.chunk_digests[chunk]
            by_relay[home(digest, alive)][digest] = chunk  # equal chunks are one
        faults: list[BaseException] = []

        def put(address: str, numbers: Iterable[int]) -> None:
            try:
                self._put_some(address, numbers)
            except BaseException as error:  # noqa: BLE001  raised below
                faults.append(error)

        streams = [
            threading.Thread(target=put, args=(address, parts.values()), name="keepstep-upload-stream", daemon=True)
            for address, parts in by_relay.items()
        ]
        for one in streams:
            one.start()
        for one in streams:
            one.join()
        if faults:
            raise faults[0]

    def _put_some(self, address: str, chunks: Iterable[int]) -> None:
        with self._failing(address), self._connected(address) as connection:
            for chunk in chunks:
                data = self._snapshot.pack[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
                delay = self._budget.delay(data.nbytes, time.monotonic())
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
        raise TransferError("no relay takes it; joiners are served directly")

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
        """What a relay may do wrong is tried again a few times, from the beginning."""
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
    """What the relay could not write is in its memory all the same, and served from there."""
    try:
        yield
    except Refusal as refusal:
        if refusal.status != FULL:
            raise
